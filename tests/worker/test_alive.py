"""The file that tells a probe whether a worker is at work."""

import threading

from worker import alive


def test_the_file_is_there_while_all_threads_work(tmp_path):
    stop = threading.Event()
    working = threading.Thread(target=stop.wait)
    working.start()
    telling = threading.Thread(target=alive.tell, args=(tmp_path / "alive", [working], stop))
    telling.start()
    stop.set()
    telling.join(10)
    working.join(10)

    assert not telling.is_alive()
    assert (tmp_path / "alive").exists()


def test_a_thread_that_has_ended_is_not_covered_up(tmp_path, caplog):
    ended = threading.Thread(target=lambda: None, name="reconciler")
    ended.start()
    ended.join()

    alive.tell(tmp_path / "alive", [ended], threading.Event())

    assert not (tmp_path / "alive").exists()
    assert "reconciler" in caplog.text
