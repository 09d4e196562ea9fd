/** Requests to the API under which the page was loaded, with the session's cookie. */

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

let whenLoggedOut = (): void => {};

/** Have `act` called when a request finds that the session has ended. */
export function onLoggedOut(act: () => void): void {
  whenLoggedOut = act;
}

async function request<T>(method: string, path: string, body?: unknown): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(`/v1${path}`, {
      method,
      headers: { "x-regraft-console": "1", ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch {
    throw new ApiError(0, "The server does not answer. It may be restarting; this page tries again.");
  }
  if (answer.status === 204) return undefined as T;
  const content: unknown = await answer.json().catch(() => null);
  if (answer.ok) return content as T;
  const message = (content as { error?: { message?: string } } | null)?.error?.message ?? answer.statusText;
  if (answer.status === 401 && path !== "/regraft/session") whenLoggedOut();
  throw new ApiError(answer.status, message);
}

export const get = <T>(path: string): Promise<T> => request("GET", path);
export const post = <T>(path: string, body?: unknown): Promise<T> => request("POST", path, body ?? {});
export const remove = <T>(path: string): Promise<T> => request("DELETE", path);

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
