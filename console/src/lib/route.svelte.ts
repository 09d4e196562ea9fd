/** The place of the page, which is in the address after `#`: `#/jobs/ftjob-1/rollouts?step=3`. */

type Route = { parts: string[]; query: URLSearchParams };

function read(): Route {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { parts: path.split("/").filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) };
}

export const place = $state<{ route: Route }>({ route: read() });

addEventListener("hashchange", () => {
  place.route = read();
});

export function link(...parts: (string | number)[]): string {
  return `#/${parts.map((part) => encodeURIComponent(part)).join("/")}`;
}

/** Change the query of the address, without an entry in the history. Empty values are left out. */
export function setQuery(changes: Record<string, string>): void {
  const query = new URLSearchParams(place.route.query);
  for (const [name, value] of Object.entries(changes)) value === "" ? query.delete(name) : query.set(name, value);
  const path = location.hash.split("?")[0] || "#/";
  const text = String(query).replaceAll("%2C", ","); // lists of ids stay readable
  history.replaceState(null, "", `${path}${text && `?${text}`}`);
  place.route = read();
}
