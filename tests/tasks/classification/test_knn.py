import pytest
import torch

from inline_attention.data import DataConfig, open_eval_data
from inline_attention.tasks.classification.knn import TEMPERATURE, knn_accuracy, vote
from inline_attention.training.distributed import Ranks


def test_votes_are_weighted_by_similarity() -> None:
    generator = torch.Generator().manual_seed(0)
    bank = torch.nn.functional.normalize(torch.randn(30, 4, generator=generator), dim=1)
    queries = torch.nn.functional.normalize(torch.randn(5, 4, generator=generator), dim=1)
    labels = torch.randint(0, 3, (30,), generator=generator)
    votes = vote(queries, bank, labels, k=7, num_classes=3)
    for query, found in zip(queries, votes, strict=True):
        similarity = [float(query @ row) for row in bank]
        expected = [0.0, 0.0, 0.0]
        for index in sorted(range(30), key=lambda i: -similarity[i])[:7]:
            expected[labels[index]] += float(torch.tensor(similarity[index] / TEMPERATURE).exp())
        assert torch.allclose(found, torch.tensor(expected), rtol=1e-4)


@pytest.mark.parametrize("k", [0, 451])
def test_the_number_of_neighbours_is_checked_before_the_model_runs(k: int) -> None:
    digits = open_eval_data(DataConfig(img_size=8, in_chans=1, workers=0))
    model = torch.nn.Identity()  # has no features
    with pytest.raises(ValueError, match=f"--knn {k}: expected 1 to 450"):
        knn_accuracy(model, digits, digits, k=k, ranks=Ranks(torch.device("cpu")))
