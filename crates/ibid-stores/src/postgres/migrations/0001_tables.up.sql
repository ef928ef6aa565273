-- What is remembered: one row per address. People may query it; only the functions of the next migration write it.
CREATE TABLE ibid.idempotency_keys (
    -- Of 32 bytes. (No column has a CHECK: the server would parse each anew for every statement.)
    address             bytea       PRIMARY KEY,
    -- 'processing', 'done', 'failed', 'unknown' or 'free'. A 'processing' one may have lapsed since (lease_until has passed):
    -- then it is unknown, and the next sweep says so. 'free' rows only remember spent tokens.
    state               text        COLLATE "C" NOT NULL,
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
    token               bytea       NOT NULL,
    fingerprint_version smallint    NOT NULL DEFAULT 0,
    fingerprint         bytea       NOT NULL,
    claimed_at          timestamptz NOT NULL,
    lease_until         timestamptz NOT NULL,
    -- When an unknown entry may be taken over.
    takeover_at         timestamptz,
    -- When it stops answering.
    expires_at          timestamptz NOT NULL,
    -- When the sweeper looks whether the row may go. An end leaves it as it is, unless the row would then stay for an
    -- eighth longer than it is remembered: an index entry costs more than all the rest of an end.
    sweep_at            timestamptz NOT NULL,
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
)
-- Room for the answer beside the claim: then an end is a heap-only update, which touches no index. Almost all records of
-- 600 bytes find room, and what does not is stored elsewhere.
WITH (fillfactor = 20);

-- No index is on what an end changes: neither the state, nor when a lease, or what is remembered, ends.
CREATE INDEX idempotency_keys_sweep_at ON ibid.idempotency_keys (sweep_at);
CREATE INDEX idempotency_keys_claimed_at ON ibid.idempotency_keys USING brin (claimed_at) WITH (pages_per_range = 16, autosummarize = on);

-- What has not ended: in progress, or nobody knows. Every such row that was claimed before `meta.indexed_until` is named
-- here, by the sweeper; some that have ended since still are. The others are found by `claimed_at`.
CREATE TABLE ibid.unfinished_keys (
    address  bytea       PRIMARY KEY,
    -- When the sweeper looks at it again.
    check_at timestamptz NOT NULL
);
CREATE INDEX unfinished_keys_check_at ON ibid.unfinished_keys (check_at);

-- One row. `generation` names the copies elsewhere that may still be trusted; `forgets` grows with every forget.
CREATE TABLE ibid.meta (
    one           boolean     PRIMARY KEY DEFAULT true CHECK (one),
    generation    bigint      NOT NULL DEFAULT 0,
    forgets       bigint      NOT NULL DEFAULT 0,
    -- The highest fence of the rows that are gone: with it fences grow beyond a row's life even if the clock is set back.
    fence_high    bigint      NOT NULL DEFAULT 0,
    indexed_until timestamptz NOT NULL DEFAULT '-infinity',
    -- What `indexed_until` becomes once all transactions before this one have ended.
    next_until    timestamptz NOT NULL DEFAULT '-infinity',
    next_xid      xid8        NOT NULL DEFAULT '0'
) WITH (fillfactor = 10);
INSERT INTO ibid.meta DEFAULT VALUES;
