DROP TABLE ibid.meta;
DROP TABLE ibid.fences;
DROP TABLE ibid.idempotency_keys;
