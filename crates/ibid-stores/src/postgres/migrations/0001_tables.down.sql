DROP TABLE ibid.meta;
DROP TABLE ibid.unfinished_keys;
DROP TABLE ibid.idempotency_keys;
