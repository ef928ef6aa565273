// Express with its defaults, which take /Payments/ for /payments. Counts what ran: GET /runs.
const express = require('express');

const app = express();
let runs = 0;
for (const path of ['/payments', '/hooks/github']) {
  app.post(path, (request, response) => {
    runs += 1;
    response.status(201).json({ run: runs });
  });
}
app.get('/runs', (request, response) => response.json(runs));
const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port));
