"""What optimizers own, and what is left out of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from milepost.state.owned import owned_by

SIZE = 256


def test_memory_that_other_processes_have_is_nobodys() -> None:
    """They write to it whenever they like, as several trainers of one model do."""
    model = nn.Linear(SIZE, SIZE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert owned_by([optimizer], [model]).total_bytes == 4 * SIZE * SIZE
    model.share_memory()
    found = owned_by([optimizer], [model])
    assert not found.num_bytes
    assert "other processes share" in found.reason


def test_embeddings_are_owned_where_it_is_asked_for() -> None:
    """But not those to which a forward pass writes."""
    plain, bag = nn.Embedding(SIZE, SIZE), nn.EmbeddingBag(SIZE, SIZE)
    model = nn.ModuleList([plain, bag, nn.Embedding(SIZE, SIZE, max_norm=1.0)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_them = owned_by([optimizer], [model], with_embeddings=True)
    assert with_them.total_bytes == 2 * 4 * SIZE * SIZE
    assert with_them.modules == (model, plain, bag)
    without = owned_by([optimizer], [model], with_embeddings=False)
    assert not without.num_bytes
    assert without.modules == (model,)


def test_a_weight_that_is_tied_to_an_embedding_is_one() -> None:
    """The last layer has the very memory to which noise is added."""
    model = nn.ModuleDict({"out": nn.Linear(SIZE, SIZE), "into": nn.Embedding(SIZE, SIZE)})
    model["out"].weight = model["into"].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert not owned_by([optimizer], [model], with_embeddings=False).num_bytes


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_made_to_wait_owns_nothing() -> None:
    """Scripted modules have no hook before they load."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(SIZE, SIZE)))
    model = nn.ModuleList([scripted, nn.Linear(SIZE, SIZE)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = owned_by([optimizer], [model])
    assert found.total_bytes == 4 * SIZE * SIZE
    assert found.modules == (model, model[1])
    assert owned_by([optimizer], [scripted]).modules == ()
