/** What the curves of several jobs are drawn over: steps, or what the steps cost, summed up to each. */

import type { Job, Step } from "./types";

export type Axis = { label: string; digits: number; of: (step: Step, job: Job) => number };

const value = (found: unknown): number => (typeof found === "number" ? found : 0);

function seconds(step: Step): number {
  return value((step.timing as { step?: { full_iteration?: number } } | undefined)?.step?.full_iteration);
}

/** As the service counts them: a CPU is one GPU. */
function gpuSeconds(step: Step): number {
  return (value(step.gpus) || 1) * seconds(step);
}

type Used = { gpu_seconds?: number; cost?: { amount: number; currency: string } | null };

/** What a GPU-second of the job costs; null: the service has no price, or nothing was used yet. */
export function rate(job: Job): { amount: number; currency: string } | null {
  const used = job.usage_metrics as Used | null;
  return used?.cost && used.gpu_seconds ? { amount: used.cost.amount / used.gpu_seconds, currency: used.cost.currency } : null;
}

/** The axes that these jobs have, by the name in the address. */
export function axesOf(jobs: Job[]): Record<string, Axis> {
  const price = jobs.map(rate).find((one) => one !== null);
  return {
    step: { label: "step", digits: 0, of: () => 1 },
    tokens: { label: "tokens", digits: 0, of: (step) => value(step.sampled_tokens) || value(step.trained_tokens) },
    gpu: { label: "minutes of worker time", digits: 2, of: (step) => gpuSeconds(step) / 60 },
    minutes: { label: "minutes", digits: 2, of: (step) => seconds(step) / 60 },
    ...(price && { money: { label: price.currency, digits: 4, of: (step: Step, job: Job) => gpuSeconds(step) * (rate(job)?.amount ?? 0) } }),
  };
}

/** The place of each step on the axis. */
export function placesOn(axis: string, axes: Record<string, Axis>, steps: Step[], job: Job): number[] {
  const one = axes[axis];
  if (axis === "step" || !one) return steps.map((step) => step.step);
  let sum = 0;
  return steps.map((step) => (sum += one.of(step, job)));
}
