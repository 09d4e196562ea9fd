/** The charts of a job's page: which metrics, in which groups, and what is usual. */

import type { Job, Step } from "./types";

export type Values = (number | null)[];
export type Line = { label: string; values: Values; color?: string; dash?: number[]; points?: boolean; faint?: boolean; result?: Result };
/** What the legend shows of a line in place of its newest value: the result of the job. */
export type Result = { step: number; value: number };
/** The usual values; null: no bound. */
export type Usual = { low: number | null; high: number | null };
export type Mark = { step: number; kind: "checkpoint" | "best" | "delivered" | "warning"; text: string };
/** From the lowest and highest value to the ends of the axis. */
export type Range = (low: number, high: number) => [number, number];
/** Where a chart is folded on the page of a job, in this order. */
export const GROUPS = ["Learning", "Policy", "Answers", "System"] as const;
export type Group = (typeof GROUPS)[number];
export type StepChart = { title: string; group: Group; lines: Line[]; usual?: Usual; range?: Range; stacked?: boolean };

type Chart = {
  title: string;
  group: Group;
  metrics: [label: string, name: string][];
  usual?: Usual | ((steps: Step[]) => Usual | undefined);
  /** By default from 0. */
  range?: Range;
  /** Left out while all of its values are 0. */
  hideZero?: boolean;
};

const share: Range = () => [0, 1];
/** From 0 to at least this, so that the bound of the usual values is in sight. */
const upTo = (least: number): Range => (low, high) => [Math.min(0, low), Math.max(least, high)];
const fromZero: Range = (low, high) => [Math.min(0, 1.05 * low), 1.05 * high || 1];

const first = (steps: Step[], name: string): number | undefined => steps.map((step) => step[name]).find((value) => typeof value === "number");

/** docs/howto/verdict.md: the bounds of the metrics and the defaults of the warnings. */
const SAMPLED: Chart[] = [
  { title: "Groups with signal", group: "Learning", metrics: [["mixed", "groups_mixed_share"], ["all 0", "groups_all_zero_share"], ["all 1", "groups_all_one_share"]], usual: { low: 0.3, high: null }, range: share },
  {
    title: "Entropy, nats per token", group: "Policy", metrics: [["sampled answers", "sampling_entropy"], ["trained tokens", "entropy"]],
    usual: (steps) => {
      const start = first(steps, "sampling_entropy");
      return start === undefined ? undefined : { low: start / 10, high: Math.max(3 * start, start + 0.5) };
    },
  },
  { title: "KL to the reference, nats per token", group: "Policy", metrics: [["KL", "kl"], ["KL to the teacher", "teacher_kl"], ["KL to the teacher, validation", "full_valid_teacher_kl"]], usual: { low: null, high: 1 } },
  {
    title: "Tokens of an answer", group: "Answers", metrics: [["mean", "completion_tokens_mean"], ["longest", "completion_tokens_max"], ["validation, mean", "valid_completion_tokens_mean"]],
    usual: (steps) => {
      const start = first(steps, "completion_tokens_mean");
      return start === undefined ? undefined : { low: null, high: 3 * start };
    },
  },
  { title: "Tokens of thoughts and answers", group: "Answers", metrics: [["thought", "reasoning_tokens_mean"], ["answer", "answer_tokens_mean"]] },
  { title: "Turns and tool calls of episodes", group: "Answers", metrics: [["turns", "episode_turns_mean"], ["calls", "tool_calls_mean"]] },
  { title: "Ends of episodes", group: "Answers", metrics: [["final", "stop_final_share"], ["max_steps", "stop_max_steps_share"], ["tokens", "stop_tokens_share"], ["context", "stop_context_share"], ["time", "stop_time_share"], ["discarded", "stop_discarded_share"]] },
  { title: "Errors of tool calls", group: "System", metrics: [["share", "tool_errors_share"]] },
  { title: "Time of tool calls", group: "System", metrics: [["p50", "tool_seconds_p50"], ["p95", "tool_seconds_p95"]] },
  { title: "Truncated answers", group: "Answers", metrics: [["training", "truncated_share"], ["validation", "valid_truncated_share"], ["within the thought", "cut_thoughts_share"]], usual: { low: null, high: 0.2 }, range: upTo(0.25) },
  { title: "Ungraded answers", group: "Learning", metrics: [["training", "mean_unresponsive_rewards"], ["validation", "valid_unresponsive_rewards"]], usual: { low: null, high: 0 }, range: upTo(0.1) },
  { title: "Sampler gap, nats per token", group: "System", metrics: [["mean", "logprob_gap"], ["KL (k3)", "logprob_gap_k3"]] },
  { title: "Effective share of the sample", group: "System", metrics: [["share", "logprob_gap_ess"]], usual: { low: 0.95, high: null }, range: (low) => [Math.min(0.9, low), 1] },
  { title: "Clipped tokens", group: "Policy", metrics: [["share", "clip_fraction"]], usual: { low: null, high: 0.2 }, range: upTo(0.25), hideZero: true },
  { title: "Norm of the gradient", group: "Policy", metrics: [["norm", "grad_norm"]] },
  { title: "KL of an update, nats per token", group: "Policy", metrics: [["KL(before || after)", "update_kl"]] },
  { title: "Learning rate", group: "Policy", metrics: [["learning rate", "learning_rate"]] },
  { title: "Explained variance of the values", group: "Policy", metrics: [["share", "explained_variance"]], usual: { low: 0, high: null } },
  { title: "pass@1, pass@k, maj@k", group: "Learning", metrics: [["pass@1", "full_valid_pass_at_1"], ["pass@k", "full_valid_pass_at_k"], ["maj@k", "full_valid_maj_at_k"]], range: share },
];
const FROM_FILES: Chart[] = [
  { title: "Loss", group: "Learning", metrics: [["train", "train_loss"], ["validation", "full_valid_loss"]] },
  { title: "Token accuracy", group: "Learning", metrics: [["train", "train_mean_token_accuracy"], ["validation", "full_valid_mean_token_accuracy"]] },
  { title: "Reward accuracy", group: "Learning", metrics: [["train", "train_mean_reward_accuracy"], ["validation", "full_valid_mean_reward_accuracy"]] },
  { title: "Reward margin of pairs", group: "Learning", metrics: [["train", "train_mean_reward_margin"], ["validation", "full_valid_mean_reward_margin"]] },
  { title: "Norm of the gradient", group: "Policy", metrics: [["norm", "grad_norm"]] },
  { title: "KL of an update, nats per token", group: "Policy", metrics: [["KL(before || after)", "update_kl"]] },
  { title: "Learning rate", group: "Policy", metrics: [["learning rate", "learning_rate"]] },
];
const PHASES: [label: string, name: string][] = [["sampling", "sampling"], ["grading", "grading"], ["training", "training"], ["validation", "eval"]];

/** The metrics that the page of a job reads; the others are several kilobytes a step. */
export const NAMES = [
  ...new Set([
    "step",
    "total_steps",
    "train_mean_reward",
    "full_valid_mean_reward",
    "full_valid_stderr",
    "full_valid_shadow_mean_reward",
    "timing.step",
    "scores.graders",
    ...[...SAMPLED, ...FROM_FILES].flatMap((chart) => chart.metrics.map(([, name]) => name)),
  ]),
];

export function column(steps: Step[], name: string): Values {
  return steps.map((step) => {
    const value = step[name];
    return typeof value === "number" ? value : null;
  });
}

/** The mean of the last `window` measured values. */
export function smooth(values: Values, window: number): Values {
  const near: number[] = [];
  let sum = 0;
  return values.map((value) => {
    if (value === null) return null;
    near.push(value);
    sum += value;
    if (near.length > window) sum -= near[near.length - window - 1]!;
    return sum / Math.min(near.length, window);
  });
}

/** How many steps are averaged: five, or a hundredth of a long job. */
export const windowOf = (count: number): number => Math.max(5, Math.round(count / 100));

/** What the legend shows of a metric of the validation: the value of the delivered checkpoint, as the job's result. */
export function resultOf(name: string, steps: Step[], delivered: Job["result"] | undefined): Result | undefined {
  if (!delivered) return undefined;
  if (name === delivered.metric) return delivered;
  const value = /^(full_)?valid_/.test(name) ? steps.find((one) => one.step === delivered.step)?.[name] : undefined;
  return typeof value === "number" ? { step: delivered.step, value } : undefined;
}

const boundsOf = (chart: Chart, steps: Step[]): Usual | undefined => (typeof chart.usual === "function" ? chart.usual(steps) : chart.usual);

/** The usual values of a metric, as its chart shades them. */
export function usualOf(metric: string, steps: Step[]): Usual | undefined {
  const chart = SAMPLED.find((one) => one.metrics.some(([, name]) => name === metric));
  return chart && boundsOf(chart, steps);
}

const isMeasured = (line: Line): boolean => line.values.some((value) => value !== null);

/** The charts below the reward that have a value. */
export function chartsOf(steps: Step[], isSampled: boolean, delivered: Job["result"] | undefined): StepChart[] {
  const charts = (isSampled ? SAMPLED : FROM_FILES).flatMap((chart): StepChart[] => {
    const lines = chart.metrics.map(([label, name]) => ({ label, values: column(steps, name), result: resultOf(name, steps, delivered) })).filter(isMeasured);
    if (!lines.length || (chart.hideZero && lines.every((line) => line.values.every((value) => !value)))) return [];
    return [{ title: chart.title, group: chart.group, lines, usual: boundsOf(chart, steps), range: chart.range ?? fromZero }];
  });
  const graders = byGrader(steps);
  if (graders.length > 1) charts.unshift({ title: "Reward by grader", group: "Learning", lines: graders });
  const phases = phasesOf(steps);
  if (phases.length) charts.push({ title: "Seconds of a step, by phase", group: "System", lines: phases, stacked: true });
  return charts;
}

type Measures = Record<string, number | null | undefined>;
type Measure = [label: string, of: (metrics: Measures) => number | null | undefined];

/** What a table of checkpoints has of each. */
export function measuresOf(checkpoints: Measures[], isSampled: boolean): Measure[] {
  const has = (name: string): boolean => checkpoints.some((one) => typeof one[name] === "number");
  if (has("full_valid_teacher_kl")) return [["KL to the teacher", (one) => one.full_valid_teacher_kl]];
  if (isSampled) return [["reward", (one) => one.full_valid_mean_reward]];
  const measures: Measure[] = [["loss", (one) => one.full_valid_loss ?? one.train_loss]];
  if (has("train_mean_reward_accuracy")) measures.push(["accuracy", (one) => one.full_valid_mean_reward_accuracy ?? one.train_mean_reward_accuracy]);
  if (has("full_valid_mean_reward_margin")) measures.push(["margin", (one) => one.full_valid_mean_reward_margin]);
  return measures;
}

/** The mean reward of each part of a multi grader in training. */
function byGrader(steps: Step[]): Line[] {
  type Scores = { graders?: { name?: string; train_reward_mean?: number | null }[] };
  const names = new Set(steps.flatMap((step) => (step.scores as Scores | undefined)?.graders?.map((one) => one.name ?? "") ?? []));
  return [...names]
    .map((name) => ({
      label: name,
      values: steps.map((step) => (step.scores as Scores | undefined)?.graders?.find((one) => one.name === name)?.train_reward_mean ?? null),
    }))
    .filter(isMeasured);
}

function phasesOf(steps: Step[]): Line[] {
  const seconds = steps.map((step) => (step.timing as { step?: Record<string, number> } | undefined)?.step);
  return PHASES.map(([label, name]) => ({ label, values: seconds.map((one) => one?.[name] ?? null) })).filter((line) => line.values.some(Boolean));
}

const short = (value: number): string => String(Number(value.toPrecision(3)));

export function usualText({ low, high }: Usual): string {
  if (low !== null && high !== null) return `${short(low)} to ${short(high)}`;
  if (low !== null) return `above ${short(low)}`;
  return high === 0 ? "0" : `below ${short(high!)}`;
}
