"""What other frameworks call our settings: a word that is unknown here is answered with the one that is meant."""

from typing import Final

OTHER_WORDS: Final = {
    **dict.fromkeys(
        ("lr", "learning_rate", "local_lr", "client_lr", "local_learning_rate"), "local.learning_rate=0.01"
    ),
    **dict.fromkeys(
        ("epochs", "local_epochs", "num_epochs", "local_ep", "num_local_epochs", "local_epoch"), "local.epochs=5"
    ),
    **dict.fromkeys(("local_steps", "num_steps", "local_iterations"), "local.steps=50"),
    **dict.fromkeys(("batch_size", "bs", "batch", "local_bs", "train_batch_size"), "local.batch_size=64"),
    **dict.fromkeys(("optimizer", "opt", "optim"), "local.optimizer=adam"),
    "momentum": "local.momentum=0.9",
    **dict.fromkeys(("weight_decay", "wd", "l2"), "local.weight_decay=1e-5"),
    **dict.fromkeys(("grad_clip", "gradient_clipping"), "local.clip_norm=10"),
    **dict.fromkeys(
        ("num_rounds", "n_rounds", "global_rounds", "communication_rounds", "comm_round", "num_server_rounds"),
        "rounds=50",
    ),
    **dict.fromkeys(
        ("num_clients", "n_clients", "num_partitions", "num_supernodes", "n_parties", "num_users", "num_parties"),
        "clients=10",
    ),
    "dataset_name": "data=mnist",
    **dict.fromkeys(("strategy", "method", "alg", "algo"), "algorithm=fedavg"),
    **dict.fromkeys(("net", "network", "arch", "architecture"), "model=niid-cnn"),
    **dict.fromkeys(("alpha", "beta", "dirichlet_alpha", "dir_alpha"), "partition=dirichlet:0.5"),
    **dict.fromkeys(("split", "partitioner", "non_iid", "iid"), "partition=iid"),
    **dict.fromkeys(
        (
            "fraction_fit",
            "fraction_train",
            "participation_rate",
            "join_ratio",
            "sample_fraction",
            "frac",
            "client_fraction",
        ),
        "sampler=poisson:0.1, or sampler=fixed-size:10",
    ),
    **dict.fromkeys(
        ("clients_per_round", "num_clients_per_round", "min_fit_clients", "client_num_per_round", "cohort_size"),
        "sampler=fixed-size:10",
    ),
    **dict.fromkeys(("mu", "proximal_mu", "prox_mu"), "algorithm=fedprox algorithm.mu=0.01"),
    **dict.fromkeys(("random_seed", "random_state"), "seed=0"),
    **dict.fromkeys(("gpu", "cuda", "use_cuda"), "device=cuda"),
    **dict.fromkeys(("num_workers", "n_jobs", "workers"), "engine=inprocess engine.workers=2"),
    **dict.fromkeys(("noise_multiplier", "sigma"), "aggregator=global-dp aggregator.noise_multiplier=1 (per client)"),
    **dict.fromkeys(
        ("clipping_norm", "max_grad_norm", "clip_norm"),
        "aggregator=global-dp aggregator.clipping_norm=1 (per client), or local.clip_norm=10 (of gradients)",
    ),
    **dict.fromkeys(
        ("epsilon", "target_epsilon"),
        "aggregator=global-dp aggregator.epsilon=8 (per client), preprocess=da-fl preprocess.epsilon=10 (per record)",
    ),
}
"""{word: settings as they are typed here}; only looked up for words that are unknown where they stand."""


def elsewhere(word: str) -> str:
    """Return ' (here: ...)' where ``word`` is one of another framework's, else nothing."""
    return f" (here: {OTHER_WORDS[word]})" if word in OTHER_WORDS else ""
