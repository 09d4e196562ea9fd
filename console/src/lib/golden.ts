/** Stored graders and their golden cases. docs/howto/stored-graders.md describes both. */

import { post } from "./api";
import { number } from "./format";
import type { CheckedCase, GoldenCase, Grader, List, Rollout } from "./types";

/** An answer that may become a golden case, with the score that it has. */
export type NewCase = { answer: string; item: Record<string, unknown>; score: number | null; rolloutId: string | null };
export type Range = { min: number | null; max: number | null };

const AT_ONCE_CHARACTERS = 1 << 20; // of JSON in one request

const SHORT = 8;
export const short = (version: string): string => version.slice(0, SHORT);
export const pathOf = (name: string): string => `/regraft/graders/${encodeURIComponent(name)}`;

/** A stored answer of a job, with the row as its grader read it. */
export function caseOf(job: string, one: Rollout): NewCase {
  return { answer: one.output_text, item: { ...(one.item ?? {}), messages: one.messages }, score: one.score, rolloutId: `${job}/${one.id}` };
}

/** The range that two texts of a form name; null: they name none. A text that is empty is no bound. */
export function rangeOf(low: string, high: string): Range | null {
  const [min, max] = [low, high].map((text) => (text.trim() === "" ? null : Number(text)));
  if (min === undefined || max === undefined || (min === null && max === null)) return null;
  if (Number.isNaN(min ?? 0) || Number.isNaN(max ?? 0) || (min !== null && max !== null && min > max)) return null;
  return { min, max };
}

export function rangeText({ min, max }: Range): string {
  if (min === max) return number(min);
  if (max === null) return `from ${number(min)}`;
  return min === null ? `to ${number(max)}` : `${number(min)} to ${number(max)}`;
}

/** Add cases; `expect` null: each has the score that it must get. */
export async function addCases(grader: string, cases: NewCase[], expect: Range | null, note: string): Promise<GoldenCase[]> {
  const asked = cases.map((one) => ({
    sample: { output_text: one.answer },
    item: one.item,
    expect: expect ?? one.score,
    note,
    rollout_id: one.rolloutId,
  }));
  const added: GoldenCase[] = [];
  let [part, size]: [unknown[], number] = [[], 0];
  const send = async (): Promise<void> => {
    if (part.length) added.push(...(await post<List<GoldenCase>>(`${pathOf(grader)}/cases`, { cases: part })).data);
    [part, size] = [[], 0];
  };
  for (const one of asked) {
    const length = JSON.stringify(one).length;
    if (size + length > AT_ONCE_CHARACTERS) await send();
    part.push(one);
    size += length;
  }
  await send();
  return added;
}

/** The JSON of a grader with sorted keys: equal for equal content. */
export function canonical(value: unknown): string {
  return JSON.stringify(value, (_, one: unknown) =>
    typeof one === "object" && one !== null && !Array.isArray(one) ? Object.fromEntries(Object.entries(one).sort(([a], [b]) => (a < b ? -1 : 1))) : one,
  );
}

/** A grader as text to compare: sorted, and with line breaks where its source code has them. */
export function comparable(grader: Grader): string {
  return JSON.stringify(JSON.parse(canonical(grader)), null, 2).replace(/\\(.)/g, (escape, sign) => (sign === "n" ? "\n" : escape));
}

/** The mask of a secret in a URL (core/masking.py). */
const MASKED_URL = /:\/\/\*\*\*@|[?&;#][^?&;#=\s"]+=\*\*\*(?=[&;#"]|$)/;

/** Whether the JSON text of a grader has the mask of a secret. */
export function hasMaskedText(text: string): boolean {
  return text.includes('"***"') || MASKED_URL.test(text);
}

/** Whether a value of the grader's headers, or a secret in its URL, is hidden. */
export function hasMask(grader: Grader | null): boolean {
  if (!grader) return false;
  if (MASKED_URL.test(String(grader.url ?? ""))) return true;
  if (Object.values((grader.headers ?? {}) as object).includes("***")) return true;
  return Object.values((grader.graders ?? {}) as Record<string, Grader>).some(hasMask);
}

/** Cases that pass with one of two graders and fail with the other. */
export function flips(before: CheckedCase[], after: CheckedCase[]): Set<string> {
  const passed = new Map(before.map((one) => [one.case_id, one.passed]));
  return new Set(after.filter((one) => passed.has(one.case_id) && passed.get(one.case_id) !== one.passed).map((one) => one.case_id));
}
