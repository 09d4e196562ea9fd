"""Components read nothing that derives from their page after they may have been left (console/derived.mjs)."""

import shutil
import subprocess
import sys
from pathlib import Path

CONSOLE = Path(__file__).parents[2] / "console"

COMPONENT = """<script lang="ts">
  import { place } from "./lib/route.svelte";
  let { id, onload }: { id: string; onload: () => void } = $props();
  const here = whileHere();
  const path = $derived(`/jobs/${id}`);
  let found = $state<string[]>([]);
  const fetched = async (): Promise<void> => void (found = await here(get(path)));
  function show(): void { found = [path]; }
  async function load(): Promise<void> {
    BODY
  }
</script>
"""

BAD = [
    "found = await get(path); if (found.length) found = [path];",
    "await get(path); onload();",
    "await get(path); show();",
    "await get(path); found = found.filter((one) => one !== path);",
    "get(path).then(() => (found = [path]));",
    "get(path).catch(show);",
    "for (;;) { found = [path]; await get('/jobs'); }",
    "for await (const one of events('/jobs')) found = [one, path];",
    "await get(path); found = [place.route.query.get('step')];",
]
GOOD = [
    "found = await here(get(path)); found = [path];",
    "here(get(path)).then(() => (found = [path])).catch(show);",
    "await fetched(); found = [path];",
    "const asked = path; found = await get(asked); found = [asked];",
    "found = await get(path);",
    "const path = '/other'; await get(path); found = [path];",
]


def problems(folder: Path) -> list[str]:
    node = shutil.which("node") or shutil.which("node", path=str(Path(sys.executable).parent))
    assert node is not None, "make setup installs Node.js"
    run = subprocess.run(
        [node, CONSOLE / "derived.mjs", folder], cwd=CONSOLE, capture_output=True, text=True, check=False
    )
    assert not run.stderr
    assert run.returncode == bool(run.stdout)
    return run.stdout.splitlines()


def write(folder: Path, bodies: list[str]) -> None:
    for number, body in enumerate(bodies):
        (folder / f"{number}.svelte").write_text(COMPONENT.replace("BODY", body))


def test_a_value_of_a_page_that_may_have_been_left_is_named_with_its_line(tmp_path: Path) -> None:
    write(tmp_path, BAD)

    named = problems(tmp_path)

    assert [one.split(": ")[0] for one in named] == [f"{number}.svelte:10" for number in range(len(BAD))]
    assert named[0].endswith("path is read after an await: wait with here(...), or read it before")


def test_what_is_read_before_an_await_or_behind_a_guard_is_right(tmp_path: Path) -> None:
    write(tmp_path, GOOD)

    assert problems(tmp_path) == []


def test_no_component_of_the_console_reads_the_values_of_a_page_that_was_left() -> None:
    assert problems(CONSOLE / "src") == []
