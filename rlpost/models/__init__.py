"""Networks as Policies: the decoder, stand-ins for its matrices, weights in and out."""

from rlpost.models.decoder import DecoderSpec, check_tokens, decoder

__all__ = ["DecoderSpec", "check_tokens", "decoder"]
