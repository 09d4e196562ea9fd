// Every method of evals, runs and output items. Prints what was answered, as JSON.
import OpenAI, { toFile } from 'openai';

const client = new OpenAI({ maxRetries: 0 });
const answers = {};
const rows = ['red', 'green', 'blue'].map((said) => ({ item: { answer: 'red' }, sample: { output_text: said } }));
const itemSchema = { type: 'object', properties: { answer: { type: 'string' } }, required: ['answer'] };

answers.created = await client.evals.create({
  name: 'colors',
  metadata: { from: 'node' },
  data_source_config: { type: 'custom', item_schema: itemSchema, include_sample_schema: true },
  testing_criteria: [
    {
      type: 'string_check',
      name: 'exact',
      input: '{{sample.output_text}}',
      reference: '{{item.answer}}',
      operation: 'eq',
    },
  ],
});
const id = answers.created.id;
answers.retrieved = await client.evals.retrieve(id);
answers.updated = await client.evals.update(id, { name: 'colours', metadata: { from: 'js' } });
answers.evals = [];
for await (const one of client.evals.list({ limit: 1, order: 'desc', order_by: 'created_at' })) {
  answers.evals.push(one);
  if (answers.evals.length === 2) break;
}

const file = await client.files.create({
  file: await toFile(Buffer.from(rows.map((row) => JSON.stringify(row)).join('\n')), 'rows.jsonl'),
  purpose: 'evals',
});
const source = { type: 'jsonl', source: { type: 'file_id', id: file.id } };
answers.run = await client.evals.runs.create(id, { name: 'first', metadata: { n: '1' }, data_source: source });
const runID = answers.run.id;
const place = { eval_id: id };
do {
  await new Promise((resolve) => setTimeout(resolve, 200));
  answers.done = await client.evals.runs.retrieve(runID, place);
} while (!['completed', 'failed', 'canceled'].includes(answers.done.status));

const waiting = await client.evals.runs.create(id, {
  data_source: {
    type: 'completions',
    model: 'o4-mini-2025-04-16',
    input_messages: { type: 'template', template: [{ role: 'user', content: 'Say {{item.answer}}' }] },
    sampling_params: { temperature: 0, max_completion_tokens: 8, seed: 1 },
    source: { type: 'file_content', content: Array(500).fill({ item: { answer: 'red' } }) },
  },
});
answers.canceled = await client.evals.runs.cancel(waiting.id, place);
answers.runs = [];
for await (const one of client.evals.runs.list(id, { limit: 1, order: 'asc' })) answers.runs.push(one.id);
answers.completed = (await client.evals.runs.list(id, { status: 'completed' })).data.map((one) => one.id);

answers.items = [];
for await (const one of client.evals.runs.outputItems.list(runID, { ...place, limit: 2 })) answers.items.push(one);
answers.failed = (await client.evals.runs.outputItems.list(runID, { ...place, status: 'fail' })).data.length;
answers.item = await client.evals.runs.outputItems.retrieve(answers.items[0].id, { ...place, run_id: runID });

answers.deletedRun = await client.evals.runs.delete(runID, place);
answers.deleted = await client.evals.delete(id);
try {
  await client.evals.retrieve(id);
} catch (error) {
  answers.gone = { class: error.constructor.name, status: error.status };
}

console.log(JSON.stringify(answers));
