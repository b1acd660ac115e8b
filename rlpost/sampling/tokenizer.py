"""Text to token ids and back, from whatever a checkpoint brings."""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

# What stands for an id that has no text: a model's vocabulary may be padded.
_NO_TEXT = "\ufffd".encode()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A vocabulary of byte strings and a way to cut text into it.

    Decoding joins the bytes of the tokens and reads them as UTF-8, so it is exact for
    any cut of a response, and a character split over tokens is never torn.

    Attributes:
        pieces: the bytes of each id; None where the id has no text.
        control: the ids of control tokens, such as those that open and close a turn.
        stop_ids: ids that end a response; there may be several.
        pad_id: fills rows on the right. It may equal a stop id: what is padding is told
            by a row's length, never by its ids.
        bos_id: begins a text, or None.
        add_bos: whether raw text is begun with `bos_id`.
        cut: `(text, special) -> ids`; `encode` is its public face.
        strip: whether decoding drops one leading space, as SentencePiece adds one.
        templates: chat templates by name, the usual one under "default".
        names: what a template may ask for: bos_token, eos_token and so on.
        definition: the content of a tokenizer.json, where there is one.
    """

    pieces: tuple[bytes | None, ...] = dataclasses.field(repr=False)
    control: frozenset[int] = dataclasses.field(repr=False)
    stop_ids: tuple[int, ...]
    pad_id: int
    bos_id: int | None = None
    add_bos: bool = False
    cut: Callable[[str, bool], list[int]] = dataclasses.field(repr=False)
    strip: bool = False
    templates: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    definition: str | None = dataclasses.field(default=None, repr=False)

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1; a model's vocabulary may be larger."""
        return len(self.pieces)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; no token is added.

        Args:
            text: any string.
            special: read control tokens written in the text as such. A rendered chat
                template needs it; data does not deserve it, since a user's text could
                then forge a turn.
        """
        return self.cut(text, special)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """The text of these ids.

        Args:
            ids: token ids. An id beyond the vocabulary, which a model with a padded
                output matrix can sample, reads as U+FFFD, and so do broken characters.
            special: write control tokens out instead of leaving them out.

        Raises:
            ValueError: on a negative id.
        """
        text = self._bytes(ids, special).decode("utf-8", "replace")
        return text[1:] if self.strip and text.startswith(" ") else text

    def stream(self, ids: Iterable[int], *, special: bool = False) -> Iterator[str]:
        """The text that each id completes, "" while a character is still open.

        Joined, and with what an unfinished character leaves, it is `decode(ids)`; the
        last piece comes once `ids` ends, so there is one piece more than ids. Stop
        strings are looked for in what has come so far.
        """
        reader = codecs.getincrementaldecoder("utf-8")("replace")
        lead = self.strip
        for token in ids:
            text = reader.decode(self._bytes([token], special))
            if lead and text:
                text, lead = text.removeprefix(" "), False
            yield text
        yield reader.decode(b"", final=True)

    def token_text(self, token: int) -> str:
        """One token for display: control tokens by name, stray bytes as \\xe2."""
        return self._bytes([token], True).decode("utf-8", "backslashreplace")

    def _bytes(self, ids: Iterable[int], special: bool) -> bytes:
        parts = []
        for token in map(int, ids):  # of an array, say
            if token < 0:
                raise ValueError(f"token id {token} is negative; ids start at 0")
            if not special and token in self.control:
                continue
            piece = self.pieces[token] if token < len(self.pieces) else None
            parts.append(_NO_TEXT if piece is None else piece)
        return b"".join(parts)


def characters(alphabet: str) -> Tokenizer:
    """A tokenizer of single characters.

    Ids 0, 1, 2 are `<pad>`, `<bos>`, `<eos>`; the alphabet follows in its order.

    Args:
        alphabet: the characters that texts may hold, each once.

    Raises:
        ValueError: if the alphabet repeats a character; when encoding, if a text holds
            a character outside it.
    """
    if len(set(alphabet)) != len(alphabet):
        twice = sorted({c for c in alphabet if alphabet.count(c) > 1})
        raise ValueError(f"the alphabet holds {twice} more than once")
    names = ("<pad>", "<bos>", "<eos>")
    to_id = {piece: i for i, piece in enumerate((*names, *alphabet))}
    either = re.compile("|".join(map(re.escape, names)) + "|.", re.DOTALL)

    def cut(text: str, special: bool) -> list[int]:
        pieces = either.findall(text) if special else text
        try:
            return [to_id[piece] for piece in pieces]
        except KeyError as error:
            raise ValueError(
                f"character {error.args[0]!r} of {text!r} is not in the alphabet "
                f"{alphabet!r}"
            ) from None

    return Tokenizer(
        pieces=tuple(piece.encode() for piece in to_id),
        control=frozenset(range(3)),
        stop_ids=(2,),
        pad_id=0,
        bos_id=1,
        add_bos=True,
        cut=cut,
        names={"pad_token": names[0], "bos_token": names[1], "eos_token": names[2]},
    )
