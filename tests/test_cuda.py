"""On a GPU: programs equal the plain model in float64, with ranks that share it; what scripts and calibration do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopart
import cuda_rank
from autopart import verify
from autopart.cluster import Cluster
from autopart.cost.calibrate import calibrate
from autopart.cost.calibrated import base_device
from autopart.models import load_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_TEXT = "vocab_size=64&seq=16&batch=8"
_GPT2 = f"hf:gpt2?n_layer=4&n_embd=32&n_head=4&n_positions=16&{_TEXT}"
_LLAMA = (
    "hf:llama?num_hidden_layers=4&hidden_size=32&intermediate_size=64&num_attention_heads=4&num_key_value_heads=2"
    f"&{_TEXT}"
)


@pytest.mark.parametrize(
    ("spec", "ranks", "limits"),
    [
        (_GPT2, 1, {}),
        (_GPT2, 2, {"pp": 2, "dp": 1, "tp": 1, "microbatches": 4}),
        (_GPT2, 2, {"pp": 2, "dp": 1, "tp": 1, "microbatches": 4, "schedule": "2bw"}),
        (_LLAMA, 2, {"pp": 2, "dp": 1, "tp": 1, "microbatches": 4, "schedule": "zb-v"}),
        (_LLAMA, 2, {"pp": 1, "dp": 1, "tp": 2, "microbatches": 1, "tensor_scheme": "sp"}),
        (_LLAMA, 4, {"pp": 1, "dp": 1, "tp": "2x2", "microbatches": 1, "tensor_scheme": "2d"}),
        *((_GPT2, 2, {"pp": 1, "dp": 2, "tp": 1, "microbatches": 2, "zero": level}) for level in (1, 2, 3)),
        (_GPT2, 4, {"pp": 2, "dp": 1, "tp": 2, "microbatches": 2, "tensor_scheme": "1d"}),
    ],
)
def test_programs_equal_the_plain_model(
    spec: str, ranks: int, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "train_and_compare", cuda_rank.train_and_compare)
    found = verify.verify(load_model(spec), cluster=Cluster.parse(f"cpu:{ranks}"), limits=limits, timeout_s=120)
    assert found.equal, found


def test_a_script_trains_on_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).double()
    x, y = torch.randn(16, 32, dtype=torch.float64), torch.randn(16, 8, dtype=torch.float64)
    loss = nn.functional.mse_loss(model(x), y)
    parallel = autopart.parallelize(model, loss_fn=nn.functional.mse_loss, verbose=False)
    found = parallel(x, targets=y).loss
    assert found.device.type == "cuda"
    torch.testing.assert_close(found.cpu(), loss.detach(), atol=1e-12, rtol=1e-12, check_stride=False)


def test_the_local_cluster_is_made_of_it() -> None:
    device = Cluster.local(1).device(0)
    assert device.kind == "cuda"
    assert device.memory_bytes <= torch.cuda.get_device_properties(0).total_memory


def test_a_calibration_fits() -> None:
    found = calibrate(torch.device("cuda", 0), quick=True)
    by_kind = {row.kind: row for row in found.accuracy(base_device("cuda"))}
    assert found.host_s > found.launch_s > 0
    assert max(by_kind[kind].median for kind in ("product", "stream", "attention")) < 0.3, by_kind
