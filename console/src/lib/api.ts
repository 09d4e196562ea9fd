/** Requests to the API under which the page was loaded, with the session's cookie. */

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    /** The field of the request that the server refuses, such as `method.reinforcement.grader.input`. */
    readonly param: string | null = null,
  ) {
    super(message);
  }
}

let whenLoggedOut = (): void => {};

/** Have `act` called when a request finds that the session has ended. */
export function onLoggedOut(act: () => void): void {
  whenLoggedOut = act;
}

async function send(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
  const isForm = body instanceof FormData; // the browser adds the content type of a form, with its boundary
  let answer: Response;
  try {
    answer = await fetch(`/v1${path}`, {
      method,
      signal,
      headers: { "x-regraft-console": "1", ...(body === undefined || isForm ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : isForm ? body : JSON.stringify(body),
    });
  } catch (cause) {
    if (signal?.aborted) throw cause;
    throw new ApiError(0, "The server does not answer. It may be restarting; this page tries again.");
  }
  if (answer.ok) return answer;
  const content = (await answer.json().catch(() => null)) as { error?: { message?: string; param?: string | null } } | null;
  if (answer.status === 401 && path !== "/regraft/session") whenLoggedOut();
  throw new ApiError(answer.status, content?.error?.message ?? answer.statusText, content?.error?.param ?? null);
}

async function request<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const answer = await send(method, path, body, signal);
  return (answer.status === 204 ? undefined : await answer.json().catch(() => null)) as T;
}

/** A response that is plain text: at most its last `bytes` are kept. */
export async function text(path: string, bytes: number): Promise<string> {
  return (await (await send("GET", path)).text()).slice(-bytes);
}

export const get = <T>(path: string): Promise<T> => request("GET", path);
export const post = <T>(path: string, body?: unknown, signal?: AbortSignal): Promise<T> =>
  request("POST", path, body ?? {}, signal);
export const remove = <T>(path: string): Promise<T> => request("DELETE", path);

/** The data of the server-sent events of a response, as JSON, until `[DONE]`. */
export async function* events<T>(path: string, body: unknown, signal: AbortSignal): AsyncGenerator<T> {
  const answer = await send("POST", path, body, signal);
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop()!;
    for (const line of lines) {
      if (!line.startsWith("data:")) continue;
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      yield JSON.parse(data) as T;
    }
  }
}

/** All pages of a list, up to `most` entries. */
export async function all<T extends { id: string }>(path: string, most = 2000): Promise<T[]> {
  const found: T[] = [];
  for (let after = ""; found.length < most; ) {
    const join = path.includes("?") ? "&" : "?";
    const page = await get<{ data: T[]; has_more: boolean }>(`${path}${join}limit=100${after && `&after=${after}`}`);
    found.push(...page.data);
    if (!page.has_more || !page.data.length) break;
    after = page.data[page.data.length - 1]!.id;
  }
  return found;
}

/** Upload a file of a dataset. */
export function upload<T>(file: File): Promise<T> {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file);
  return request("POST", "/files", form);
}

/** The first lines of a file: at most `count`, and at most `bytes` of text. The rest is not downloaded. */
export async function firstLines(id: string, count: number, bytes = 4 << 20): Promise<{ lines: string[]; isAll: boolean }> {
  const stop = new AbortController();
  const answer = await send("GET", `/files/${id}/content`, undefined, stop.signal);
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let breaks = 0;
  let isAll = false;
  while (breaks < count && text.length < bytes) {
    const { done, value } = await reader.read();
    if (done) {
      isAll = true;
      break;
    }
    breaks += value.split("\n").length - 1;
    text += value;
  }
  if (!isAll) {
    await reader.cancel().catch(() => {});
    stop.abort();
  }
  const lines = text.split("\n");
  if (lines[lines.length - 1] === "") lines.pop();
  else if (!isAll) lines.pop(); // cut off
  return { lines: lines.slice(0, count), isAll: isAll && lines.length <= count };
}
