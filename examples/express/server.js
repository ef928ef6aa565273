// A payments API without a word about idempotency: npm install express && node server.js 3000
const express = require('express');
const { randomBytes } = require('node:crypto');

const app = express();
app.use(express.json());

app.post('/payments', (request, response) => {
  response.status(201).json({
    id: randomBytes(4).toString('hex'),        // another one on every run
    amount: request.body.amount ?? null,
    attempt: Number(request.get('Ibid-Attempt') ?? 0),
  });
});

const server = app.listen(Number(process.argv[2] ?? 3000), '127.0.0.1', () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}`);
});
