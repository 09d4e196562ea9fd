/** Whether a run is healthy: one measure each, against the bounds that its chart shades. */

import { number, percent } from "./format";
import { type Group, usualOf, usualText } from "./steps";
import type { Step } from "./types";

export type Sign = { name: string; group: Group; value: string; isUsual: boolean; reason: string };

type Rule = {
  name: string;
  group: Group;
  metric: string;
  show: (value: number) => string;
  /** What the value means, and what to do where it is unusual. */
  meaning: (value: number, step: Step) => string;
  advice: (step: Step) => string;
};

const share = (step: Step, name: string): number => (typeof step[name] === "number" ? step[name] : 0);

const RULES: Rule[] = [
  {
    name: "Signal",
    group: "Learning",
    metric: "groups_mixed_share",
    show: percent,
    meaning: (value) => `${percent(value)} of the groups have answers with different scores. Only these teach.`,
    advice: (step) =>
      share(step, "groups_all_one_share") >= share(step, "groups_all_zero_share")
        ? "In most others every answer scores 1: the rows are nearly learned. Harder rows would teach more."
        : "In most others every answer scores 0: easier rows or partial credit would teach more.",
  },
  {
    name: "Entropy",
    group: "Policy",
    metric: "sampling_entropy",
    show: (value) => number(value),
    meaning: (value) => `The answers vary by ${number(value)} nats a token.`,
    advice: () => "Low entropy is expected where few answers are possible. On an open task, lower the learning rate.",
  },
  {
    name: "Drift",
    group: "Policy",
    metric: "kl",
    show: (value) => number(value),
    meaning: (value) => `The model is ${number(value)} nats a token from where it started (KL to the reference).`,
    advice: () => "Compare its answers to other prompts with those of the base model; a KL penalty or a lower learning rate holds it closer.",
  },
  {
    name: "Length",
    group: "Answers",
    metric: "completion_tokens_mean",
    show: (value) => `${number(value, 0)} ${Math.round(value) === 1 ? "token" : "tokens"}`,
    meaning: (value) => `An answer has ${number(value, 1)} tokens on average.`,
    advice: () => "Answers have become much longer. Read some: a grader may reward length.",
  },
  {
    name: "Cut off",
    group: "Answers",
    metric: "truncated_share",
    show: percent,
    meaning: (value) => `${percent(value)} of the answers reach the token limit and are cut off.`,
    advice: () => "Raise max_completion_tokens, or grade shorter answers better.",
  },
  {
    name: "Ungraded",
    group: "Learning",
    metric: "mean_unresponsive_rewards",
    show: percent,
    meaning: (value) => `${percent(value)} of the answers have no score.`,
    advice: () => "The grader failed on them. The rollouts without a score give its reasons.",
  },
  {
    name: "Sampler",
    group: "System",
    metric: "logprob_gap_ess",
    show: (value) => (value > 0.9995 ? "exact" : percent(value)),
    meaning: (value) => `${percent(value)} of the sample counts: the sampler and the trainer give the answers nearly the same probabilities.`,
    advice: () => "The sampler differs from the trainer: check its precision and its version.",
  },
];

/** The signs that a job has at a step, or at the newest step that has them before; what is unusual first. */
export function healthOf(steps: Step[], at: number | undefined): Sign[] {
  const until = at === undefined ? steps : steps.filter((one) => one.step <= at);
  const signs = RULES.flatMap((rule): Sign[] => {
    const step = until.findLast((one) => typeof one[rule.metric] === "number");
    if (!step) return [];
    const value = step[rule.metric] as number;
    const usual = usualOf(rule.metric, steps);
    const isUsual = !usual || ((usual.low === null || value >= usual.low) && (usual.high === null || value <= usual.high));
    const reason = [rule.meaning(value, step), usual ? `Usual: ${usualText(usual)}.` : "", isUsual ? "" : rule.advice(step)].filter(Boolean).join(" ");
    return [{ name: rule.name, group: rule.group, value: rule.show(value), isUsual, reason }];
  });
  return [...signs.filter((sign) => !sign.isUsual), ...signs.filter((sign) => sign.isUsual)];
}
