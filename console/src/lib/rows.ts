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

export type Message = { role: string; content: unknown; tool_calls?: unknown };

const isMessage = (value: unknown): boolean => typeof value === "object" && value !== null;

/** The messages of a row of any format; none of a row whose messages are no list of objects. */
export function messagesOf(item: Record<string, unknown>): Message[] {
  const input = item.input as { messages?: unknown } | null | undefined;
  const messages = item.messages ?? input?.messages;
  return Array.isArray(messages) && messages.every(isMessage) ? (messages as Message[]) : [];
}

/** The last message that is not an answer, of any format of rows. */
export function promptOf(item: Record<string, unknown>): string {
  return contentOf(messagesOf(item).filter((message) => message.role !== "assistant").at(-1)?.content);
}

/** The answers that a row has: the last message of a supervised one, both of a preference. */
export function answersOf(item: Record<string, unknown>): [string, string][] {
  const given: [string, unknown][] = ["output", "preferred_output", "non_preferred_output"].map((name) => [name, item[name]]);
  const last = messagesOf(item).at(-1);
  if (last?.role === "assistant") given.unshift(["assistant", [last]]);
  return given
    .map(([name, messages]): [string, Message | undefined] => [name, Array.isArray(messages) ? (messages as Message[])[0] : undefined])
    .filter(([, message]) => message !== undefined)
    .map(([name, message]) => [name, contentOf(message?.content) || textOf(message?.tool_calls)]);
}

const RESERVED = new Set(["messages", "tools", "input", "output", "preferred_output", "non_preferred_output", "parallel_tool_calls"]);

/** The fields that graders may read as `item.<field>`. */
export function fieldsOf(rows: Row[]): string[] {
  return [...new Set(rows.flatMap((row) => Object.keys(row.item ?? {})))].filter((name) => !RESERVED.has(name));
}

export function textOf(value: unknown): string {
  return typeof value === "string" ? value : value === undefined ? "" : JSON.stringify(value);
}

const REFERENCE = /^\s*\{\{\s*item\.([\w.]+)\s*\}\}\s*$/;

/** The fields of a row that a grader, or a part of it, compares an answer with: `desk` of "{{ item.desk }}". */
export function referencesOf(grader: unknown): string[] {
  if (typeof grader !== "object" || grader === null) return [];
  const found = Object.entries(grader).flatMap(([name, value]) => {
    if (name !== "reference" || typeof value !== "string") return referencesOf(value);
    const field = REFERENCE.exec(value)?.[1];
    return field === undefined ? [] : [field];
  });
  return [...new Set(found)];
}

/** What the row says is right; empty: no grader compares with a field of it. */
export function expectedOf(references: string[], item: Record<string, unknown> | null | undefined): string {
  const values = references.map((path) => path.split(".").reduce<unknown>((at, name) => (typeof at === "object" && at !== null ? (at as Record<string, unknown>)[name] : undefined), item ?? {}));
  return [...new Set(values.map(textOf))].filter(Boolean).join(", ");
}

/** The question of a prompt: its last message of a user. */
export function questionOf(messages: { [name: string]: unknown }[]): string {
  return contentOf(messages.filter((message) => message.role === "user").at(-1)?.content ?? messages.at(-1)?.content);
}
