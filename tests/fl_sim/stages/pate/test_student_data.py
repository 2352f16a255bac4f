"""What a student may see of a public pool: all of it, and the labels of the queries that were answered."""

import numpy as np
import torch

from fl_sim.stages.pate.run import student_data
from strategies.pate.labelling import UNANSWERED, Labelled


def test_a_student_learns_from_the_queries_that_were_answered_and_from_no_other() -> None:
    pool = torch.arange(5.0).reshape(5, 1)
    data = student_data(pool, Labelled(np.array([2, UNANSWERED, 0, UNANSWERED]), 4), 3)
    assert data.labelled.flatten().tolist() == [0.0, 2.0]
    assert data.labels.tolist() == [2, 0]
    assert torch.equal(data.unlabelled, pool)
