-- What is remembered: one row per address. People may query it; only the functions of the next migration write it.
CREATE TABLE ibid.idempotency_keys (
    address             bytea       PRIMARY KEY CHECK (octet_length(address) = 32),
    -- 'processing' may have lapsed since (lease_until has passed): then it is unknown, and the next sweep says so.
    -- 'free' rows only remember spent tokens.
    state               text        COLLATE "C" NOT NULL
                                    CHECK (state IN ('processing', 'done', 'failed', 'unknown', 'free')),
    tenant              text        COLLATE "C" NOT NULL DEFAULT '',
    user_id             text        COLLATE "C" NOT NULL DEFAULT '',
    endpoint            text        COLLATE "C" NOT NULL DEFAULT '',
    key                 text        COLLATE "C" NOT NULL DEFAULT '',
    -- Of the whole key, of which the one above may be masked: what an exact key is found by.
    key_hash            text        COLLATE "C" NOT NULL DEFAULT '',
    -- The five above, byte for byte, where they hold what text cannot (a zero byte).
    tags                bytea,
    label               bytea       NOT NULL DEFAULT '',
    attempt             integer     NOT NULL,
    fence               bigint      NOT NULL,
    token               bytea       NOT NULL CHECK (octet_length(token) = 16),
    fingerprint_version smallint    NOT NULL DEFAULT 0,
    fingerprint         bytea       NOT NULL,
    claimed_at          timestamptz NOT NULL,
    lease_until         timestamptz NOT NULL,
    -- When an unknown entry may be taken over.
    takeover_at         timestamptz,
    -- When it stops answering.
    expires_at          timestamptz NOT NULL,
    -- When the row may go: not before the last spent token may be forgotten.
    delete_after        timestamptz NOT NULL,
    -- As asked, in microseconds.
    hold_us             bigint      NOT NULL,
    keep_us             bigint      NOT NULL,
    -- The holder took over an unknown one: its release restores that.
    took_over           boolean     NOT NULL DEFAULT false,
    -- 'unknown' because the lease lapsed: the holder may still come back.
    lapsed              boolean     NOT NULL DEFAULT false,
    -- 'unknown' because a takeover was released: its token is spent.
    released            boolean     NOT NULL DEFAULT false,
    -- 'done' or 'failed' because an operator said so.
    resolved            boolean     NOT NULL DEFAULT false,
    -- Somebody waits for the holder: its end is notified.
    waited              boolean     NOT NULL DEFAULT false,
    -- Tokens of earlier holders that were released or forgotten, and until when each is remembered.
    spent               bytea[],
    spent_until         timestamptz[],
    -- The answer: the record as the gateway wrote it, or status, headers (an object: name to value or list of values)
    -- and body, from which it is put together.
    record              bytea,
    status              integer,
    headers             jsonb,
    body                bytea,
    requested_at        timestamptz,
    completed_at        timestamptz,
    took                interval
);

CREATE INDEX idempotency_keys_delete_after ON ibid.idempotency_keys (delete_after);
CREATE INDEX idempotency_keys_unfinished ON ibid.idempotency_keys (address) WHERE state IN ('processing', 'unknown');
CREATE INDEX idempotency_keys_lease_until ON ibid.idempotency_keys (lease_until) WHERE state = 'processing';
CREATE INDEX idempotency_keys_tenant ON ibid.idempotency_keys (tenant) WHERE tenant <> '';
CREATE INDEX idempotency_keys_user_id ON ibid.idempotency_keys (user_id) WHERE user_id <> '';
CREATE INDEX idempotency_keys_key ON ibid.idempotency_keys (key) WHERE key <> '';
CREATE INDEX idempotency_keys_key_hash ON ibid.idempotency_keys (key_hash) WHERE key_hash <> '';

-- The highest fence of the rows that are gone, per first byte of their address: with it fences grow beyond a row's
-- life even if the clock is set back.
CREATE TABLE ibid.fences (
    bucket smallint PRIMARY KEY CHECK (bucket BETWEEN 0 AND 255),
    high   bigint   NOT NULL DEFAULT 0
);
INSERT INTO ibid.fences (bucket) SELECT generate_series(0, 255);

-- One row. `generation` names the copies elsewhere that may still be trusted; `forgets` grows with every forget.
CREATE TABLE ibid.meta (
    one        boolean PRIMARY KEY DEFAULT true CHECK (one),
    generation bigint  NOT NULL DEFAULT 0,
    forgets    bigint  NOT NULL DEFAULT 0
);
INSERT INTO ibid.meta DEFAULT VALUES;
