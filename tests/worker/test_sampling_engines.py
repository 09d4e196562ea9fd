"""How groups are dealt to engines and engines to GPUs."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.present import untyped
from worker.engine.client import EngineGone
from worker.engine.launch import ChildEngine
from worker.engine.protocol import AnswerRequest, GroupRequest, pack_ids
from worker.model.engine_sizes import EngineShare, EngineSizes
from worker.sampling.own import OwnEngine, OwnEngines
from worker.sampling.placement import NotPlaceable, gpus_of_job, place
from worker.sampling.pool import choose


def dealt(sizes: list[int], loads: list[int], *, engines: int) -> list[int | None]:
    """The engines that groups of these sizes go to, one after the other."""
    loads, left, chosen = [*loads], sum(sizes), []
    for size in sizes:
        engine = choose(loads, left, engines)
        chosen.append(engine)
        if engine is not None:
            loads[engine] += size
            left -= size
    return chosen


class TestDealing:
    def test_each_group_goes_to_the_engine_with_the_fewest_tokens(self) -> None:
        assert dealt([5, 4, 3, 3], [0, 0], engines=2) == [0, 1, 1, 0]

    def test_what_an_engine_still_samples_counts(self) -> None:
        assert dealt([2, 2], [10, 0], engines=2) == [1, 1]

    def test_a_group_waits_for_an_engine_that_is_starting_if_the_others_have_their_share(self) -> None:
        assert dealt([1, 1, 1, 1], [0], engines=2) == [0, 0, None, None]

    def test_nothing_waits_if_every_engine_is_ready(self) -> None:
        sizes = [9, 7, 7, 1, 1, 1]

        assert None not in dealt(sizes, [30, 0, 2], engines=3)

    def test_groups_wait_while_no_engine_is_ready(self) -> None:
        assert dealt([3, 3], [], engines=0) == [None, None]

    def test_the_prompt_of_a_group_is_counted_once(self) -> None:
        answers = tuple(AnswerRequest(str(member), 0, 100) for member in range(2))

        assert GroupRequest("", pack_ids([7] * 10), answers, 1.0, ()).tokens == 10 + 100 + 100


class TestPlace:
    def test_every_gpu_of_the_job_has_an_engine(self) -> None:
        placement = place(engines="auto", tensor_parallel=1, device="cuda", gpus=("0", "1", "2"))

        assert placement.gpus_E == (("0",), ("1",), ("2",))

    def test_an_engine_has_as_many_neighboring_gpus_as_its_degree(self) -> None:
        placement = place(engines="auto", tensor_parallel=2, device="cuda", gpus=("4", "5", "6", "7"))

        assert placement.gpus_E == (("4", "5"), ("6", "7"))
        assert str(placement) == "2 vLLM engines of tensor parallel degree 2 on GPUs 4, 5; 6, 7"

    def test_gpus_that_are_too_few_for_another_engine_only_learn(self) -> None:
        placement = place(engines="auto", tensor_parallel=2, device="cuda", gpus=("0", "1", "2"))

        assert placement.gpus_E == (("0", "1"),)

    def test_the_operator_may_ask_for_fewer_engines(self) -> None:
        placement = place(engines=1, tensor_parallel=1, device="cuda", gpus=("0", "1"))

        assert placement.gpus_E == (("0",),)

    @pytest.mark.parametrize(("engines", "degree", "needed"), [("auto", 4, 4), (3, 1, 3), (2, 2, 4)])
    def test_engines_that_need_more_gpus_than_a_job_has_are_refused(
        self, engines: int | str, degree: int, needed: int
    ) -> None:
        with pytest.raises(NotPlaceable, match=rf"needs {needed} GPUs.*A job has 2 here"):
            place(
                engines="auto" if isinstance(engines, str) else engines,
                tensor_parallel=degree,
                device="cuda",
                gpus=("0", "1"),
            )

    def test_a_cpu_has_one_engine_unless_the_operator_asks_for_more(self) -> None:
        one = place(engines="auto", tensor_parallel=2, device="cpu", gpus=())
        two = place(engines=2, tensor_parallel=1, device="cpu", gpus=())

        assert (one.engines, one.processes) == (1, 2)
        assert (two.engines, two.processes) == (2, 2)
        assert str(two) == "2 vLLM engines"

    def test_split_the_engines_have_the_gpus_without_a_rank(self) -> None:
        five = ("0", "1", "2", "3", "4")
        split = place(
            engines="auto", tensor_parallel=1, device="cuda", gpus=five, sampling_gpus=2, off_policy=True
        )

        assert (split.kind, split.gpus_E) == ("split", (("3",), ("4",)))

    def test_a_job_that_does_not_sample_ahead_is_colocated_on_all_gpus(self) -> None:
        placement = place(
            engines="auto",
            tensor_parallel=1,
            device="cuda",
            gpus=("0", "1"),
            sampling_gpus=1,
            off_policy=False,
        )

        assert (placement.kind, placement.gpus_E) == ("colocated", (("0",), ("1",)))

    def test_split_engines_on_a_cpu_are_as_many_processes(self) -> None:
        split = place(
            engines="auto", tensor_parallel=1, device="cpu", gpus=(), sampling_gpus=2, off_policy=True
        )

        assert (split.kind, split.gpus_E, str(split)) == ("split", ((), ()), "2 vLLM engines")

    def test_split_engines_that_need_more_than_the_sampling_gpus_are_refused(self) -> None:
        with pytest.raises(NotPlaceable, match=r"needs 2 GPUs.*A job has 1 here \(REGRAFT_SAMPLING_GPUS\)"):
            place(
                engines="auto",
                tensor_parallel=2,
                device="cuda",
                gpus=("0", "1", "2"),
                sampling_gpus=1,
                off_policy=True,
            )

    def test_gpus_have_the_names_that_the_operator_gave_this_process(self) -> None:
        assert gpus_of_job({}, 2) == ("0", "1")
        assert gpus_of_job({"CUDA_VISIBLE_DEVICES": "3,GPU-8f2,5"}, 2) == ("3", "GPU-8f2")


def test_an_engine_is_killed_even_if_the_job_ends_while_the_reason_for_its_loss_is_awaited(
    tmp_path: Path,
) -> None:
    """It has closed a connection and still runs. Nothing else could end it, or free its memory."""

    async def lose() -> bool:
        engines = OwnEngines(untyped(None), [("0",)], patience=600.0, max_restarts=1, on_restart=print)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=PIPE)
        async with httpx.AsyncClient() as client:
            child = ChildEngine(tmp_path, process, client)
            engine = OwnEngine(
                "the vLLM engine",
                client,
                child=child,
                number=0,
                folder=ExitStack(),
                replaces=False,
                share=EngineShare(0, EngineSizes(16)),
            )
            engines.by_number[0] = engine
            losing = asyncio.create_task(engines.lose(engine, EngineGone("it closed the connection")))
            await asyncio.sleep(0)  # until it waits for the exit status
            losing.cancel()
            await asyncio.wait([losing])
            return child.has_exited

    assert asyncio.run(lose())
