"""The loop of diffusers' tutorial on unconditional image generation: UNet2DModel, DDPMScheduler, AdamW, cosine schedule."""

import torch
import torch.nn.functional as F
import torchvision_on_cpu  # noqa: F401
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup

torch.set_num_threads(1)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=32,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer=optimizer, num_warmup_steps=5, num_training_steps=30)
for step in range(30):
    clean_images = torch.rand(4, 3, 32, 32) * 2 - 1
    noise = torch.randn(clean_images.shape)
    timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (4,), dtype=torch.int64)
    noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
    noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
    loss = F.mse_loss(noise_pred, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    lr_scheduler.step()
    optimizer.zero_grad()
