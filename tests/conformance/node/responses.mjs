// A response, its stream, and a refusal. Prints what was answered, as JSON.
import OpenAI from 'openai';

const client = new OpenAI();
const request = { model: 'o4-mini-2025-04-16', input: 'Hello!', reasoning: { effort: 'low' } };
const answers = {};

answers.response = await client.responses.create(request);
answers.text = answers.response.output_text;

const stream = client.responses.stream(request);
answers.events = [];
for await (const event of stream) answers.events.push(event.type);
answers.final = await stream.finalResponse();

try {
  await client.responses.create({ ...request, tools: [{ type: 'web_search' }] });
} catch ({ status, code, param }) {
  answers.refused = { status, code, param };
}

console.log(JSON.stringify(answers));
