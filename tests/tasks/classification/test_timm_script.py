"""What timm's own train.py does with a model, in its words: the models train there after `import inline_attention`."""

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.data import resolve_data_config
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3

import inline_attention  # noqa: F401  (registers the models)


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_one_update(name: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        name, pretrained=False, in_chans=3, num_classes=7, drop_rate=0.0, drop_path_rate=0.1, drop_block_rate=None,
        global_pool=None, bn_momentum=None, bn_eps=None, scriptable=False, checkpoint_path="", img_size=64,
    )  # fmt: skip
    data = resolve_data_config({"img_size": 64}, model=model)
    assert data["input_size"] == (3, 64, 64)
    model.set_grad_checkpointing(enable=True)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.8)
    average = ModelEmaV3(model, decay=0.9)
    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=3, updates_per_epoch=2, step_on_epochs=False
    )
    before = {key: value.clone() for key, value in average.module.state_dict().items()}
    loss = F.cross_entropy(model(torch.randn(2, *data["input_size"])), torch.tensor([1, 2]))
    loss.backward()
    optimizer.step()
    scheduler.step_update(1)
    average.update(model)
    assert epochs == 3
    assert loss.isfinite()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []
    assert sum(group["weight_decay"] == 0 for group in optimizer.param_groups) > 1
    assert any(not torch.equal(value, before[key]) for key, value in average.module.state_dict().items())
