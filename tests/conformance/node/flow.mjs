// Files, graders, a job to its end, its events, checkpoints and model. Prints what was answered, as JSON.
import OpenAI, { toFile } from 'openai';

const client = new OpenAI();
const row = (n) => JSON.stringify({ messages: [{ role: 'user', content: `Q${n}?` }], answer: `a${n}` }) + '\n';
const grader = {
  type: 'text_similarity',
  name: 'close',
  input: '{{sample.output_text}}',
  reference: '{{item.answer}}',
  evaluation_metric: 'fuzzy_match',
};
const answers = {};

const train = await client.files.create({
  file: await toFile(Buffer.from(row(1) + row(2) + row(3)), 'train.jsonl'),
  purpose: 'fine-tune',
});
const valid = await client.files.create({
  file: await toFile(Buffer.from(row(4)), 'valid.jsonl'),
  purpose: 'fine-tune',
  expires_after: { anchor: 'created_at', seconds: 3600 },
});
answers.file = await client.files.waitForProcessing(train.id);
answers.files = (await client.files.list({ limit: 2 })).data;

const data = Buffer.from(row(5));
const upload = await client.uploads.create({
  bytes: data.length,
  filename: 'parts.jsonl',
  mime_type: 'text/jsonl',
  purpose: 'fine-tune',
});
const part = await client.uploads.parts.create(upload.id, { data: await toFile(data) });
answers.upload = await client.uploads.complete(upload.id, { part_ids: [part.id] });

await client.fineTuning.alpha.graders.validate({ grader });
answers.run = await client.fineTuning.alpha.graders.run({ grader, item: { answer: 'x y' }, model_sample: 'x y' });

answers.created = await client.fineTuning.jobs.create({
  model: 'o4-mini-2025-04-16',
  training_file: train.id,
  validation_file: valid.id,
  method: {
    type: 'reinforcement',
    reinforcement: { grader, hyperparameters: { n_epochs: 1, reasoning_effort: 'medium' } },
  },
  metadata: { from: 'node' },
});
answers.jobs = (await client.fineTuning.jobs.list({ metadata: { from: 'node' } })).data;
const id = answers.created.id;
const ended = ['succeeded', 'failed', 'cancelled'];
do {
  await new Promise((resolve) => setTimeout(resolve, 200));
  answers.job = await client.fineTuning.jobs.retrieve(id);
} while (!ended.includes(answers.job.status));

answers.events = [];
for await (const event of client.fineTuning.jobs.listEvents(id, { limit: 3 })) answers.events.push(event);
answers.checkpoints = [];
for await (const one of client.fineTuning.jobs.checkpoints.list(id)) answers.checkpoints.push(one);
answers.model = await client.models.retrieve(answers.job.fine_tuned_model);
answers.content = await (await client.files.content(answers.job.result_files[0])).text();
answers.deleted = await client.models.delete(answers.job.fine_tuned_model);

console.log(JSON.stringify(answers));
