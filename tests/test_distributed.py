"""hf.distributed in four processes: sums in rank order, training steps, DTensors.

``main`` runs in each of the processes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

import distributed_dtensors
import distributed_sums
import fresh
import holdfast as hf
import ranks
from distributed_dtensors import CASES, flat
from distributed_sums import RANKS, by_numpy, same_bits, shard
from holdfast.core.autograd import ARGUMENTS
from holdfast.distributed.dtensor import rules_of_operators

SECONDS = 240
IMPORTS = ranks.OF_COMPILERS
CHECKS = distributed_sums.CHECKS | distributed_dtensors.CHECKS


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return ranks.run_checks(__file__, tmp_path_factory.mktemp("ranks"), RANKS, SECONDS)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(name: str, failures: list[dict[str, str]]) -> None:
    ranks.assert_passed(name, failures)


def test_without_a_process_group_there_is_one_rank() -> None:
    terms = [shard(s, (7,), torch.bfloat16) for s in range(3)]
    same_bits(hf.distributed.ordered_all_reduce(terms, divisor=3), by_numpy(terms, 3))
    found = hf.distributed.ordered_all_reduce(terms[0])
    same_bits(found, terms[0])
    assert found.data_ptr() != terms[0].data_ptr()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor": 1.0}, "tensor is a float; it must be a torch tensor"),
        ({"tensor": []}, "there is no tensor to reduce; pass a tensor"),
        ({"tensor": [None]}, "there is no tensor to reduce; pass a tensor"),
        ({"tensor": torch.ones(2, dtype=torch.int32)}, "tensor has dtype torch.int32; accepted are"),
        ({"tensor": [torch.ones(2), torch.ones(3)]}, r"the shards \(2,\) torch.float32 on cpu and \(3,\)"),
        ({"divisor": 0}, "divisor is 0; it must be a number other than 0"),
        ({"divisor": float("nan")}, "divisor is nan; it must be a finite number"),
        ({"group": "ranks"}, "group is 'ranks'; it must be a process group of torch.distributed, or None"),
        ({"buffer_bytes": 0}, "buffer_bytes is 0; accepted are whole numbers from 1"),
    ],
)
def test_a_bad_argument_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(hf.InvalidArgs, match=said):
        hf.distributed.ordered_all_reduce(**{"tensor": torch.ones(2), **given})


def test_the_reduce_scatter_refuses_other_operations() -> None:
    with pytest.raises(hf.Unsupported, match="accepted are the sum and the average, synchronously"):
        hf.distributed.OrderedReduceScatter()(torch.ones(1), torch.ones(1), None, distributed.ReduceOp.MAX)


def test_every_rule_is_used_by_a_case() -> None:
    called: set[str] = set()

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(str(func).removeprefix("holdfast.").removesuffix(".default"))
            return func(*args, **(kwargs or {}))

    for case in CASES.values():
        plain = {key: t.clone().requires_grad_(key in case.gradients) for key, t in case.tensors.items()}
        with Recording():
            found = flat(case.function(**plain))[0]
            if case.gradients:
                found.sum().backward()
    sparse = {"embedding_touched_rows_backward", "embedding_bag_touched_rows_backward"}
    assert set(rules_of_operators()) == (called & set(ARGUMENTS)) | sparse


def test_importing_holdfast_does_not_import_dtensors() -> None:
    code = "import sys, holdfast; sys.exit('torch.distributed.tensor' in sys.modules)"
    assert fresh.run(code).returncode == 0


def main(rank: int, folder: Path) -> None:
    ranks.check_all(CHECKS, rank, RANKS, folder)
