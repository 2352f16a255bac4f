"""Names of settings in other frameworks, and the equivalent settings of fl-sim, for messages about unknown names.

This module imports only modules that load fast, so that the message for a typing error appears at once.
"""

from typing import Final

_OTHER_WORDS: Final = {
    "local.learning_rate=0.01": "lr learning_rate local_lr client_lr local_learning_rate",
    "local.epochs=5": "epochs local_epochs num_epochs local_ep num_local_epochs local_epoch",
    "local.steps=50": "local_steps num_steps local_iterations",
    "local.batch_size=64": "batch_size bs batch local_bs train_batch_size",
    "local.optimizer=adam": "optimizer opt optim",
    "local.momentum=0.9": "momentum",
    "local.weight_decay=1e-5": "weight_decay wd l2",
    "local.clip_norm=10": "grad_clip gradient_clipping",
    "rounds=50": "num_rounds n_rounds global_rounds communication_rounds comm_round num_server_rounds",
    "clients=10": "num_clients n_clients num_partitions num_supernodes n_parties num_users num_parties",
    "data=mnist": "dataset_name",
    "algorithm=fedavg": "strategy method alg algo",
    "model=niid-cnn": "net network arch architecture",
    "partition=dirichlet:0.5": "alpha beta dirichlet_alpha dir_alpha",
    "partition=iid": "split partitioner non_iid iid",
    "sampler=poisson:0.1, or sampler=fixed-size:10": (
        "fraction_fit fraction_train participation_rate join_ratio sample_fraction frac client_fraction"
    ),
    "sampler=fixed-size:10": "clients_per_round num_clients_per_round min_fit_clients client_num_per_round cohort_size",
    "algorithm=fedprox algorithm.mu=0.01": "mu proximal_mu prox_mu",
    "seed=0": "random_seed random_state",
    "device=cuda": "gpu cuda use_cuda",
    "engine=inprocess engine.workers=2": "num_workers n_jobs workers",
    "aggregator=global-dp aggregator.noise_multiplier=1 (per client)": "noise_multiplier sigma",
    "aggregator=global-dp aggregator.clipping_norm=1 (per client), or local.clip_norm=10 (of gradients)": (
        "clipping_norm max_grad_norm clip_norm"
    ),
    "aggregator=global-dp aggregator.epsilon=8 (per client), preprocess=da-fl preprocess.epsilon=10 (per record)": (
        "epsilon target_epsilon"
    ),
}

OTHER_WORDS: Final = {word: setting for setting, words in _OTHER_WORDS.items() for word in words.split()}
"""{name of a setting in other frameworks: setting of fl-sim}, for messages about unknown names."""


def bare(name: str) -> str:
    """Return ``name`` in lower case, without hyphens and underscores. Names are compared in this form."""
    return name.casefold().replace("-", "").replace("_", "")


_DP_SGD: Final = "dp_sgd dpsgd opacus dp private privacy privacy_engine record_level_dp dp_fedsgd dpfedavg"
_LOCAL_DP: Final = "local_dp ldp localdpmod local_differential_privacy"
_DISTRIBUTED_DP: Final = "distributed_dp ddgauss skellam secagg secagg+ secure_aggregation secaggplusworkflow"
_OF_PRIVACY: Final = {
    (
        "for noise in the clients' training steps (DP-SGD) set local.privacy=dp-sgd local.privacy.epsilon=8. Other "
        "guarantees: per client, aggregator=global-dp; per record, synthetic records by preprocess=da-fl or labels by "
        "algorithm=pate; docs/privacy.md compares them. For noise on each client's update (local DP) set "
        "local.privacy=local-dp"
    ): _DP_SGD,
    (
        "for noise on each client's update (local differential privacy) set local.privacy=local-dp "
        "local.privacy.epsilon=8; docs/privacy.md compares it with the other guarantees"
    ): _LOCAL_DP,
    (
        "for noise that the clients add together, and a server that sees only sums (distributed differential privacy), "
        "set aggregator=distributed-dp aggregator.epsilon=8; secure aggregation itself is simulated by a plain sum. "
        "To compute with real masks, but without a privacy guarantee, set aggregator=secure-sum"
    ): _DISTRIBUTED_DP,
}

OF_PRIVACY: Final = {bare(word): reason for reason, words in _OF_PRIVACY.items() for word in words.split()}
"""{name of a privacy feature in other frameworks: settings of fl-sim}, for messages about unknown names."""


def privacy_settings(word: str) -> str:
    """Return fl-sim's settings for ``word``, the name of a privacy feature in another framework.

    Return an empty text for any other word.
    """
    return OF_PRIVACY.get(bare(word), "")


def elsewhere(word: str) -> str:
    """Return ' (here: ...)', a hint for error messages, if ``word`` is the name of a setting in another framework.

    The dots stand for fl-sim's equivalent setting. Return "" for any other word.
    """
    plain = word.lower().replace("-", "_")
    return f" (here: {OTHER_WORDS[plain]})" if plain in OTHER_WORDS else ""
