"""Reinforcement learning from a queue: an actor plays episodes while the learner trains on those before.

The actor of each rank is a thread that plays with weights of one step ago; the loss corrects for that. So a batch depends on
its step and on weights that the checkpoint has, and a run that resumes sees the same episodes.

    python queue_rl.py runs/queue_rl
    unisono launch -n 2 -- python queue_rl.py runs/queue_rl
"""

from __future__ import annotations

import copy
import os
import sys
from contextlib import closing
from queue import Queue
from threading import Thread

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, one_hot

from unisono import CheckpointOptions, GuardedOptimizer, LoopCheckpoints
from unisono.data import rank_range
from unisono.dist import job_from_environ, join_world
from unisono.parallel import find_device

EPISODES, LENGTH, PLACES = 32, 8, 7  # episodes of a step, moves of an episode, places on a line
Played = dict[str, Tensor]  # each [episodes, LENGTH]


def play(policy: nn.Module, step: int, episodes: range) -> Played:
    """Play some of the episodes of a step: walk from the middle of a line; every move at its right end pays 1."""
    chances = torch.rand(EPISODES, LENGTH, generator=torch.Generator().manual_seed(step))
    place = torch.full([len(episodes)], PLACES // 2)
    seen: dict[str, list[Tensor]] = {"place": [], "right": [], "log_chance": [], "reward": []}
    for chance in chances[episodes.start : episodes.stop].unbind(1):
        logit = policy(one_hot(place, PLACES).float())[:, 0]
        right = chance < logit.sigmoid()
        moved = (place + torch.where(right, 1, -1)).clamp(0, PLACES - 1)
        entries = place, right, log_chance(logit, right), (moved == PLACES - 1).float()
        for name, entry in zip(seen, entries, strict=True):
            seen[name].append(entry)
        place = moved
    return {name: torch.stack(entries, dim=1) for name, entries in seen.items()}


def log_chance(logit: Tensor, right: Tensor) -> Tensor:
    """Log probability of a move."""
    return logsigmoid(torch.where(right, logit, -logit))


def losses(model: nn.ModuleDict, played: Played) -> Tensor:
    """Policy gradient with a learned baseline, weighted by how likely the policy of now would have moved like that."""
    places = one_hot(played["place"], PLACES).float()
    returns = played["reward"].flip(1).cumsum(1).flip(1)  # from each move on
    value = model["value"](places)[..., 0]
    gain = (returns - value).detach()
    ratio = (log_chance(model["policy"](places)[..., 0], played["right"]) - played["log_chance"]).exp()
    return 0.5 * (returns - value).square() - ratio * gain


def models() -> nn.ModuleDict:
    torch.manual_seed(0)
    names = ("policy", "value")
    return nn.ModuleDict({name: nn.Sequential(nn.Linear(PLACES, 16), nn.Tanh(), nn.Linear(16, 1)) for name in names})


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-2)


class Actor(Thread):
    """Plays this rank's episodes of each step that it is sent weights for, ahead of the learner."""

    def __init__(self, policy: nn.Module, episodes: range) -> None:
        super().__init__(daemon=True)
        self._policy, self._episodes = copy.deepcopy(policy).cpu(), episodes
        self._weights: Queue[tuple[int, dict[str, Tensor]] | None] = Queue()
        self._played: Queue[Played | Exception] = Queue()

    def send(self, step: int, policy: nn.Module) -> None:
        """Ask for the episodes of ``step``, played with the weights of ``policy`` as they are."""
        self._weights.put((step, {name: value.detach().cpu().clone() for name, value in policy.state_dict().items()}))

    def take(self) -> Played:
        """The oldest episodes asked for."""
        played = self._played.get()
        if isinstance(played, Exception):
            raise played
        return played

    def close(self) -> None:
        self._weights.put(None)
        self.join()

    def run(self) -> None:
        try:
            while (job := self._weights.get()) is not None:
                step, weights = job
                self._policy.load_state_dict(weights)
                with torch.no_grad():
                    self._played.put(play(self._policy, step, self._episodes))
        except Exception as error:
            self._played.put(error)


def main(folder: str, steps: int = 60) -> None:
    job = job_from_environ(os.environ)
    device = find_device("auto", job.local_rank)
    with closing(join_world(job, device_type=device.type, timeout_s=300)) as world:
        model = models().to(device)
        behaviour = copy.deepcopy(model["policy"])  # what the next episodes are played with
        optimizer = GuardedOptimizer(model, adam(model), world, clip_norm=1.0)
        actor = Actor(behaviour, rank_range(EPISODES, world.rank, world.world_size))
        actor.start()
        parts = {"optimizer": optimizer, "behaviour": behaviour}
        with (
            closing(actor),
            LoopCheckpoints(folder, parts, world, options=CheckpointOptions(every_steps=10)) as checkpoints,
        ):
            first = checkpoints.resume()
            actor.send(first, behaviour)
            for step in range(first, steps):
                played = {name: entry.to(device) for name, entry in actor.take().items()}
                behaviour.load_state_dict(model["policy"].state_dict())
                actor.send(step + 1, behaviour)  # played while the learner trains
                values = losses(model, played)
                optimizer.backward(values.sum(), values.numel(), last=True)
                done = optimizer.step()
                reward = world.all_reduce(played["reward"].sum()) / EPISODES
                if world.rank == 0:
                    print(f"step {step + 1} {done.loss:.6f} {reward:.6f}", flush=True)
                checkpoints.after_step(step + 1)
            checkpoints.save(max(first, steps))
        optimizer.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
