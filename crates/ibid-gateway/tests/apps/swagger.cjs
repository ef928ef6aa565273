// Express with Swagger UI, as its users set it up: the page at /swagger/, the document at /swagger/v1/swagger.json.
// GET /sent says how often the document was sent, and how often 304 was enough.
const express = require('express');
const fs = require('node:fs');
const ui = require('swagger-ui-dist').absolutePath();

const document = JSON.parse(fs.readFileSync(process.argv[2], 'utf8'));
const sent = { whole: 0, unmodified: 0 };
const app = express();
app.get('/swagger/v1/swagger.json', (request, response) => {
  response.on('finish', () => (sent[response.statusCode === 304 ? 'unmodified' : 'whole'] += 1));
  response.json(document);
});
app.get('/swagger/swagger-initializer.js', (request, response) => {
  response.type('js').send(`window.ui = SwaggerUIBundle({
    url: '/swagger/v1/swagger.json',
    dom_id: '#swagger-ui',
    docExpansion: 'full',
    validatorUrl: null,
    presets: [SwaggerUIBundle.presets.apis, SwaggerUIStandalonePreset],
    layout: 'StandaloneLayout',
  });`);
});
app.use('/swagger', express.static(ui));
app.get('/sent', (request, response) => response.json(sent));
const server = app.listen(0, '127.0.0.1', () => console.log(server.address().port));
