/** Results of a grader on many answers. */

import type { Graded } from "./graders";

/** An answer to grade; `before` is the score that is stored with it. */
export type Case = { id: string; label: string; answer: string; item: Record<string, unknown>; before: number | null; group: string; rolloutId: string | null };
export type Result = { case: Case; graded: Graded };

type Bin = { low: number; high: number; count: number };

/** Counts of the scores in ten bins; the first ends below, the last includes its upper bound. */
export function histogram(scores: number[]): Bin[] {
  if (!scores.length) return [];
  const low = scores.reduce((a, b) => Math.min(a, b), 0);
  const high = scores.reduce((a, b) => Math.max(a, b), 1);
  const bins = Array.from({ length: 10 }, (_, index) => ({ low: low + ((high - low) * index) / 10, high: low + ((high - low) * (index + 1)) / 10, count: 0 }));
  for (const score of scores) bins[Math.min(9, Math.floor((10 * (score - low)) / (high - low)))]!.count += 1;
  return bins;
}

export function mean(values: number[]): number | null {
  return values.length ? values.reduce((a, b) => a + b, 0) / values.length : null;
}

/** Whether two rewards differ by rounding at most, as core/rewards.py has it. */
function equal(one: number, other: number): boolean {
  return Math.abs(one - other) <= 1e-6 * Math.max(1, Math.abs(one), Math.abs(other));
}

export type Comparison = { both: number; higher: number; lower: number; same: number; gained: number; lost: number; before: number | null; after: number | null };

/** The new scores against the stored ones, over the answers that have both. */
export function compare(results: Result[]): Comparison {
  const pairs = results.flatMap(({ case: one, graded }) => (one.before !== null && graded.score !== null ? [[one.before, graded.score] as const] : []));
  return {
    both: pairs.length,
    higher: pairs.filter(([before, after]) => after > before && !equal(before, after)).length,
    lower: pairs.filter(([before, after]) => after < before && !equal(before, after)).length,
    same: pairs.filter(([before, after]) => equal(before, after)).length,
    gained: results.filter(({ case: one, graded }) => one.before === null && graded.score !== null).length,
    lost: results.filter(({ case: one, graded }) => one.before !== null && graded.score === null).length,
    before: mean(pairs.map(([before]) => before)),
    after: mean(pairs.map(([, after]) => after)),
  };
}

/** Of the groups of answers to one prompt, how many have answers with different scores: only these teach the model. */
export function groupsWithSignal(results: Result[], score: (result: Result) => number | null): { signal: number; groups: number } {
  const groups = new Map<string, number[]>();
  for (const result of results) {
    const value = score(result);
    if (value !== null) groups.set(result.case.group, [...(groups.get(result.case.group) ?? []), value]);
  }
  const several = [...groups.values()].filter((values) => values.length > 1);
  return { signal: several.filter((values) => values.some((value) => !equal(value, values[0]!))).length, groups: several.length };
}

/** Errors by kind, most frequent first. */
export function errorsOf(results: Result[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const { graded } of results) for (const name of graded.errors) counts.set(name, (counts.get(name) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}
