/** Rows of a dataset, as far as the pages show them. */

import { contentOf } from "./format";

/** A row, or what is wrong with its line. */
export type Row = { line: number; item: Record<string, unknown> | null; problem: string };

export function parseRow(text: string, line: number): Row {
  try {
    const item: unknown = JSON.parse(text);
    if (typeof item === "object" && item !== null && !Array.isArray(item)) return { line, item: item as Record<string, unknown>, problem: "" };
    return { line, item: null, problem: "not a JSON object" };
  } catch (cause) {
    return { line, item: null, problem: `not JSON: ${(cause as Error).message}` };
  }
}

/** The last message of the prompt, of any format of rows. */
export function promptOf(item: Record<string, unknown>): string {
  const input = item.input as { messages?: unknown } | undefined;
  const messages = item.messages ?? input?.messages;
  if (!Array.isArray(messages) || !messages.length) return "";
  return contentOf((messages[messages.length - 1] as { content?: unknown } | null)?.content);
}

const RESERVED = new Set(["messages", "tools", "input", "preferred_output", "non_preferred_output", "parallel_tool_calls"]);

/** The fields that graders may read as `item.<field>`. */
export function fieldsOf(rows: Row[]): string[] {
  return [...new Set(rows.flatMap((row) => Object.keys(row.item ?? {})))].filter((name) => !RESERVED.has(name));
}

export function textOf(value: unknown): string {
  return typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
}
