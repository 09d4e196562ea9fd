/** The layout of a pipeline: each stage is one column to the right of the last stage that it needs. */

import type { Stage } from "./types";

type Box = { stage: Stage; x: number; y: number };
export type Graph = { boxes: Box[]; lines: [Box, Box][]; width: number; height: number };

export const WIDE = 150;
export const HIGH = 44;
const GAP_X = 46;
const GAP_Y = 16;

export function graphOf(stages: Stage[]): Graph {
  const columns = new Map<string, number>();
  const named = new Map(stages.map((stage) => [stage.name, stage]));
  const columnOf = (name: string): number => {
    const known = columns.get(name);
    if (known !== undefined) return known;
    const needs = named.get(name)?.needs ?? [];
    const column = needs.length ? 1 + Math.max(...needs.map(columnOf)) : 0;
    columns.set(name, column);
    return column;
  };
  const filled: number[] = [];
  const boxes = stages.map((stage) => {
    const column = columnOf(stage.name);
    const row = filled[column] ?? 0;
    filled[column] = row + 1;
    return { stage, x: column * (WIDE + GAP_X), y: row * (HIGH + GAP_Y) };
  });
  const at = new Map(boxes.map((box) => [box.stage.name, box]));
  return {
    boxes,
    lines: boxes.flatMap((box) => box.stage.needs.map((name): [Box, Box] => [at.get(name)!, box])),
    width: Math.max(...boxes.map((box) => box.x)) + WIDE,
    height: Math.max(...boxes.map((box) => box.y)) + HIGH,
  };
}
