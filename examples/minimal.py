"""Train, save, resume. Run it twice: the second run goes on where the first one stopped.

torchrun --standalone --nproc-per-node 2 examples/minimal.py
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from onecopy import ZeroRedundancyOptimizer

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)))
optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
checkpoint = Path("minimal.pt")
start = 0

if checkpoint.exists():  # every rank reads the whole file and keeps its own share of the state
    saved = torch.load(checkpoint, weights_only=True)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["step"]

for step in range(start + 1, start + 101):
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())  # other data on each rank
    inputs = torch.randn(32, 64)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

optimizer.consolidate_state_dict(to=0)  # a collective: every rank calls it, rank 0 gets the state
if dist.get_rank() == 0:
    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({"step": step, **state}, checkpoint)
    print(f"step {step}: loss {loss.item():.3f}, saved {checkpoint}")
dist.destroy_process_group()
