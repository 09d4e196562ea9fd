"""Entry point of the processes of worker/learn/ranks.py: compute gradients for a run and exit with it."""

import argparse
import signal
import socket

import torch

from core.jobs.hyperparameters import Resolved
from worker import process
from worker.learn.gradient import OwnGradient, flat, shaped
from worker.learn.members import ReadAhead
from worker.learn.ranks import (
    Add,
    Again,
    Collect,
    End,
    Line,
    Message,
    Part,
    Ready,
    Reference,
    Start,
    Weights,
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m worker.learn.rank")
    parser.add_argument("parent", type=int, help="process id of the run; this process exits with it")
    parser.add_argument("connection", type=int, help="file descriptor of the socket to the run")
    args = parser.parse_args()
    process.die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides
    serve(Line(socket.socket(fileno=args.connection)))


def serve(line: Line | ReadAhead, *, gpu: int = 0) -> None:
    """Serve rank 0 until it closes the connection. Errors are raised, and end the run.

    `gpu` is for a rank 0 on another machine, which does not know the GPUs of this one.
    """
    gradient: OwnGradient | None = None
    while True:
        try:
            message: Message = line.receive()
        except EOFError:
            return
        if isinstance(message, Start):
            gradient = start(message, gpu)
            line.send(Ready())
        else:
            assert gradient is not None, "Start comes first"
            if isinstance(message, Collect):
                line.send(collected(gradient))
            else:
                obey(gradient, message)


def start(told: Start, gpu: int) -> OwnGradient:
    if told.threads:
        torch.set_num_threads(told.threads)
    device = f"cuda:{gpu}" if told.device == "cuda" else told.device
    if device != "cpu":
        torch.cuda.set_device(device)
    policy = told.model.load_checked(device)
    assert isinstance(told.model.settings, Resolved), "offline jobs have one rank"
    return OwnGradient(policy, told.model.settings, token_budget=told.token_budget, held_to=told.held_to)


def obey(gradient: OwnGradient, message: Weights | Reference | Add | Again | End) -> None:
    trainable = gradient.policy.trainable
    match message:
        case Weights(vector):
            with torch.no_grad():
                for parameter, weight in zip(trainable, shaped(vector, trainable), strict=True):
                    parameter.copy_(weight)
        case Reference(vector):
            gradient.reference = [tensor.clone() for tensor in shaped(vector, trainable)]
        case Add(packs, std):
            gradient.add(packs, std)
        case Again(std):
            gradient.again(std)
        case End():
            gradient.end()


def collected(gradient: OwnGradient) -> Part:
    totals = gradient.collect()
    trainable = gradient.policy.trainable
    parts = [torch.zeros_like(one) if one.grad is None else one.grad for one in trainable]
    for parameter in trainable:
        parameter.grad = None
    return Part(flat(parts), totals)


if __name__ == "__main__":
    main()
