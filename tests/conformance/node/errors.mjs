// Errors by class, the request id, and a webhook that is delivered and unwrapped. Prints what was answered, as JSON.
import { createServer } from 'node:http';
import OpenAI from 'openai';

const client = new OpenAI({ maxRetries: 0 });
const answers = {};
const caught = async (call) => {
  try {
    await call();
  } catch (error) {
    const { status, code, param, type } = error;
    return { class: error.constructor.name, status, code, param, type };
  }
};

answers.unknown = await caught(() => client.fineTuning.jobs.retrieve('ftjob-abc123'));
answers.refused = await caught(() => client.fineTuning.alpha.graders.validate({ grader: { type: 'shell' } }));
const { request_id: requestId } = await client.models.list().withResponse();
answers.requestId = requestId;

let delivered;
const delivery = new Promise((resolve) => (delivered = resolve));
const server = createServer((request, response) => {
  let body = '';
  request.on('data', (chunk) => (body += chunk));
  request.on('end', () => {
    response.writeHead(200).end();
    delivered({ body, headers: request.headers });
  });
});
await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve));
const endpoint = await client.webhooks.create({
  name: 'node',
  url: `http://127.0.0.1:${server.address().port}/webhook`,
  event_types: ['fine_tuning.job.succeeded'],
});
await client.webhooks.test(endpoint.id, { event_type: 'fine_tuning.job.succeeded' });
const { body, headers } = await delivery;
answers.event = await client.webhooks.unwrap(body, headers, endpoint.signing_secret);
await client.webhooks.delete(endpoint.id);
server.close();
server.closeAllConnections();

console.log(JSON.stringify(answers));
