/** The stream of the project: which jobs, pipelines and eval runs changed. A page opens one and closes it when it goes. */

export type State = { kind: "job" | "pipeline" | "eval_run"; id: string; status: string; [name: string]: unknown };

const TOGETHER_MS = 300;

/**
 * Call `reload` soon after each change of these kinds, once for all that come together, and every `every` milliseconds
 * while there is no stream: behind a proxy that buffers it, or on plain http. `note` gets each state at once.
 */
export function live(kinds: State["kind"][], reload: () => void, every: number, note: (state: State) => void = () => {}): () => void {
  const seen = new Map<string, string>();
  let isOpen = false;
  let waiting: ReturnType<typeof setTimeout> | undefined;
  const source = new EventSource("/v1/regraft/stream");
  source.onopen = () => (isOpen = true);
  source.onerror = () => (isOpen = false);
  for (const kind of kinds) {
    source.addEventListener(kind, (message: MessageEvent<string>) => {
      const state = JSON.parse(message.data) as State;
      note(state);
      // What a job does inside of its step changes every second; `note` shows it without a request.
      const lasting = JSON.stringify(kind === "job" ? { ...state, progress: null } : state);
      if (seen.get(state.id) === lasting) return;
      seen.set(state.id, lasting);
      waiting ??= setTimeout(() => {
        waiting = undefined;
        reload();
      }, TOGETHER_MS);
    });
  }
  const timer = setInterval(() => {
    if (!isOpen) reload();
  }, every);
  return () => {
    source.close();
    clearInterval(timer);
    clearTimeout(waiting);
  };
}
