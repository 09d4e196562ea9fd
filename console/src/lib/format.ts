import type { Job, Progress } from "./types";

export function number(value: unknown, digits = 2): string {
  return typeof value === "number" && Number.isFinite(value) ? value.toFixed(digits) : "–";
}

/** A whole number, with commas between thousands. */
export function count(value: number): string {
  return value.toLocaleString("en-US");
}

/** A percentage that the service has rounded to one digit, so that those of a whole add up to 100. */
export function share(percentage: number): string {
  return `${percentage.toFixed(1)} %`;
}

/** An amount of money without its currency, as the command line writes it. Small ones need more digits. */
export function amountOf(value: number): string {
  const size = Math.abs(value);
  if (size > 0 && size < 0.0001) return "< 0.0001";
  const digits = size > 0 && size < 0.995 ? 4 : 2;
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** An amount of money; empty without a price. */
export function money(cost: { amount: number; currency: string } | null | undefined): string {
  return cost ? `${amountOf(cost.amount)} ${cost.currency}` : "";
}

export function percent(value: unknown): string {
  return typeof value === "number" ? `${Math.round(100 * value)} %` : "–";
}

export function when(seconds: number | null): string {
  return seconds === null ? "–" : new Date(1000 * seconds).toISOString().slice(0, 16).replace("T", " ") + " UTC";
}

export function whenExactly(seconds: number): string {
  return new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.max(0, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** What a run does inside of its step: "Step 3: sampling 37 of 64". */
export function doing(now: Progress): string {
  const place = now.step === null ? "" : `Step ${now.step}: `;
  const counted = now.of === null ? "" : ` ${now.done ?? 0} of ${now.of}`;
  return `${place}${now.phase}${counted}`;
}

export function signed(value: number | null | undefined, digits = 2): string {
  if (value === null || value === undefined) return "–";
  const text = value.toFixed(digits);
  if (Number(text) === 0) return (0).toFixed(digits); // not -0.00
  return `${value > 0 ? "+" : ""}${text}`;
}

/** Text of a message whose content may be a list of parts. */
export function contentOf(content: unknown): string {
  if (typeof content === "string") return content;
  if (!Array.isArray(content)) return content === null || content === undefined ? "" : JSON.stringify(content);
  return content.map((part) => (typeof part?.text === "string" ? part.text : `[${part?.type ?? "part"}]`)).join("\n");
}

export function bytes(size: number): string {
  if (size < 1000) return `${size} B`;
  if (size < 1e6) return `${(size / 1e3).toFixed(1)} kB`;
  return size < 1e9 ? `${(size / 1e6).toFixed(1)} MB` : `${(size / 1e9).toFixed(2)} GB`;
}

/** A value as a Python literal. */
export function python(value: unknown, indent = ""): string {
  const inner = `${indent}    `;
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return value.length ? `[\n${value.map((one) => `${inner}${python(one, inner)},\n`).join("")}${indent}]` : "[]";
  if (typeof value === "object") {
    const entries = Object.entries(value);
    return entries.length ? `{\n${entries.map(([name, one]) => `${inner}${JSON.stringify(name)}: ${python(one, inner)},\n`).join("")}${indent}}` : "{}";
  }
  return JSON.stringify(value);
}

/** A text as one word of a shell command. */
export function shellWord(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** What a job is called: its own name, or what it does. */
export const jobName = (job: Job): string => job.user_provided_suffix ?? `${job.method.type} on ${job.model}`;

/** A job in a list to choose from, where several may have its name. */
export const jobTitle = (job: Job): string => `${jobName(job)}, ${when(job.created_at)}, ${job.status}`;
