"""A vision transformer of timm with timm's optimizer, scheduler and loss."""

import torch
import torchvision_on_cpu  # noqa: F401
from timm import create_model
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler

torch.set_num_threads(1)
torch.manual_seed(0)
model = create_model("vit_tiny_patch16_224", img_size=96, depth=4, num_classes=10)
optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05)
scheduler = CosineLRScheduler(optimizer, t_initial=30)
criterion = LabelSmoothingCrossEntropy()
for update in range(30):
    loss = criterion(model(torch.randn(16, 3, 96, 96)), torch.randint(10, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step_update(update)
