"""How groups are dealt to engines and engines to GPUs."""

import pytest

from worker.rollout.samplers import dealing
from worker.rollout.samplers.placement import NotPlaceable, gpus_of_job, place
from worker.rollout.samplers.wire import Request


def request(prompt: int, member: int, *, length: int = 10, max_tokens: int = 100) -> Request:
    return Request(prompt, member, (7,) * length, 0, 1.0, max_tokens, (), "")


class TestDeal:
    def test_each_group_goes_to_the_engine_with_the_fewest_tokens(self) -> None:
        assert dealing.deal([5, 4, 3, 3], [0, 0], engines=2) == [0, 1, 1, 0]

    def test_what_an_engine_still_samples_counts(self) -> None:
        assert dealing.deal([2, 2], [10, 0], engines=2) == [1, 1]

    def test_a_group_waits_for_an_engine_that_is_starting_if_the_others_have_their_share(self) -> None:
        assert dealing.deal([1, 1, 1, 1], [0], engines=2) == [0, 0, None, None]

    def test_nothing_waits_if_every_engine_is_ready(self) -> None:
        sizes = [9, 7, 7, 1, 1, 1]

        assert None not in dealing.deal(sizes, [30, 0, 2], engines=3)

    def test_groups_wait_while_no_engine_is_ready(self) -> None:
        assert dealing.deal([3, 3], [], engines=0) == [None, None]

    def test_the_prompt_of_a_group_is_counted_once(self) -> None:
        requests = [request(0, 0), request(0, 1), request(1, 0, length=30, max_tokens=5)]

        assert dealing.tokens(requests) == 10 + 100 + 100 + 30 + 5

    def test_unfinished_answers_of_a_prompt_stay_together(self) -> None:
        left = [request(4, 1), request(4, 3), request(2, 0)]

        assert dealing.grouped(left) == [tuple(left[:2]), (left[2],)]


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
