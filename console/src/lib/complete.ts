/** What may be written at the cursor of a grader's JSON, by the schemas of the API. The text need not be complete JSON. */

import { branches, type Schema, type Schemas } from "./schema";

/** A change of the text: `insert` replaces what is between `from` and `to`; the cursor goes to `cursor`. */
export type Completion = { label: string; isRequired: boolean; from: number; to: number; insert: string; cursor: number };

type Entry = { key: string; from: number; to: number; value: string | null };
/** An object around the cursor: where it begins, and the key that it is the value of. */
type Frame = { start: number; key: string | null; isList: boolean };

/** The end of the string that begins at `at`, after its closing quote; the end of the line if it is not closed. */
function stringEnd(text: string, at: number): number {
  let end = at + 1;
  while (end < text.length && text[end] !== '"' && text[end] !== "\n") end += text[end] === "\\" ? 2 : 1;
  return Math.min(text.length, text[end] === '"' ? end + 1 : end);
}

/** The containers around a place, outermost first. */
function frames(text: string, place: number): Frame[] {
  const open: Frame[] = [];
  let last: string | null = null; // the last string, which is the key of a value that follows
  for (let at = 0; at < place; at++) {
    const sign = text[at]!;
    if (sign === '"') {
      const end = stringEnd(text, at);
      last = text.slice(at + 1, end).replace(/"$/, "");
      at = end - 1;
    } else if (sign === "{" || sign === "[") {
      open.push({ start: at, key: last, isList: sign === "[" });
      last = null;
    } else if (sign === "}" || sign === "]") open.pop();
    else if (sign === ",") last = null;
  }
  return open;
}

/** The keys of the object that begins at `start`, with their values where those are strings. */
function entries(text: string, start: number): Entry[] {
  const found: Entry[] = [];
  let depth = 0;
  let key: string | null = null;
  for (let at = start; at < text.length; at++) {
    const sign = text[at]!;
    if (sign === '"') {
      const end = stringEnd(text, at);
      const word = text.slice(at + 1, end).replace(/"$/, "");
      if (depth === 1 && key === null) {
        key = word;
        found.push({ key, from: at, to: end, value: null });
      } else if (depth === 1) {
        const own = found.at(-1)!;
        [own.from, own.to, own.value] = [at, end, word];
      }
      at = end - 1;
    } else if (sign === "{" || sign === "[") depth += 1;
    else if (sign === "}" || sign === "]") {
      depth -= 1;
      if (depth === 0) break;
    } else if (sign === "," && depth === 1) key = null;
  }
  return found;
}

/** The kinds of graders by their type. */
function kinds(of: Schemas): Map<string, Schema> {
  const specs = Object.entries(of).filter(([name, one]) => name.endsWith("Spec") && typeof one.properties?.type?.const === "string" && name !== "MessageSpec");
  return new Map(specs.map(([, one]) => [one.properties!.type!.const as string, one]));
}

function optionsOf(of: Schemas, schema: Schema | undefined): string[] {
  return branches(of, schema).flatMap((one) => (one.enum ?? (one.const === undefined ? [] : [one.const])).filter((value) => typeof value === "string"));
}

/** A value to begin with, and how far from its end the cursor goes. */
function blank(of: Schemas, schema: Schema): [string, number] {
  const [first] = optionsOf(of, schema);
  if (first !== undefined) return [JSON.stringify(first), 1];
  const type = branches(of, schema)[0]?.type;
  const values: Record<string, [string, number]> = { string: ['""', 1], array: ["[]", 1], object: ["{}", 1], boolean: ["false", 0], integer: ["1", 0], number: ["0", 0] };
  return values[typeof type === "string" ? type : ""] ?? ['""', 1];
}

export function completions(of: Schemas, text: string, place: number): Completion[] {
  const around = frames(text, place);
  const inner = around.at(-1);
  if (!inner || inner.isList) return [];
  const own = entries(text, inner.start);
  const types = kinds(of);
  const typeOf = (frame: Frame | undefined): Schema | undefined => types.get(entries(text, frame?.start ?? 0).find((one) => one.key === "type")?.value ?? "");
  const holder = around.at(-2);
  if (inner.key === "graders" && typeOf(holder)) return []; // its keys are names
  const isParams = inner.key === "sampling_params";
  const schema = isParams ? branches(of, typeOf(holder)?.properties?.sampling_params).find((one) => one.properties) : typeOf(inner);

  // Within a string value: the values that there are for its key.
  const within = own.find((one) => one.value !== null && one.from < place && place < one.to);
  if (within) {
    const values = within.key === "type" && !isParams ? [...types.keys()] : optionsOf(of, schema?.properties?.[within.key]);
    const other = values.filter((value) => value !== within.value);
    if (other.length)
      return other.map((value) => ({ label: value, isRequired: false, from: within.from, to: within.to, insert: JSON.stringify(value), cursor: within.from + value.length + 1 }));
  }
  if (!schema) {
    if (own.some((one) => one.key === "type") || isParams) return [];
    return [...types.keys()].map((type) => entry(text, place, "type", JSON.stringify(type), 0, `type: ${type}`, true));
  }
  const used = new Set(own.map((one) => one.key));
  return Object.entries(schema.properties ?? {})
    .filter(([name]) => !used.has(name))
    .map(([name, one]) => {
      const [value, back] = blank(of, one);
      return entry(text, place, name, value, back, name, Boolean(schema.required?.includes(name)));
    });
}

/** A new entry of the object around the cursor: there, if an entry may begin there, else at the end of the object. */
function entry(text: string, place: number, key: string, value: string, back: number, label: string, isRequired: boolean): Completion {
  const { start } = frames(text, place).at(-1)!;
  const isWithin = entries(text, start).some((one) => one.from < place && place < one.to);
  const isHere = !isWithin && ["{", ","].includes(text.slice(0, place).trimEnd().at(-1)!);
  const at = isHere ? place : end(text, start);
  const previous = text.slice(start, at).trimEnd().at(-1)!;
  const isOnOwnLine = isHere && /\n *$/.test(text.slice(0, at));
  const outer = `\n${/^ */.exec(text.slice(text.lastIndexOf("\n", start) + 1))![0]}`;
  // A closing brace on the same line gets a line of its own.
  const closing = /^ *(?=\})/.exec(text.slice(at));
  const before = (["{", ","].includes(previous) ? "" : ",") + (isOnOwnLine ? "" : `${outer}  `);
  const after = closing ? outer : text.slice(at).trimStart().startsWith('"') ? "," : "";
  const body = `${JSON.stringify(key)}: ${value}`;
  return { label, isRequired, from: at, to: at + (closing?.[0].length ?? 0), insert: before + body + after, cursor: at + before.length + body.length - back };
}

/** After the last sign within the object that begins at `start`. */
function end(text: string, start: number): number {
  let depth = 0;
  for (let at = start; at < text.length; at++) {
    const sign = text[at]!;
    if (sign === '"') at = stringEnd(text, at) - 1;
    else if (sign === "{" || sign === "[") depth += 1;
    else if (sign === "}" || sign === "]") {
      depth -= 1;
      if (depth === 0) return start + text.slice(start, at).trimEnd().length;
    }
  }
  return text.trimEnd().length;
}
