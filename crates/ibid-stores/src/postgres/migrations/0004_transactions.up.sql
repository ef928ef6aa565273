-- For callers that have a transaction of their own: claim, business write and answer commit together. What has no
-- underscore is for every language; the rest is for ibid-postgres-tx.
--
-- Rules that hold throughout: whoever may run holds the advisory lock of the address until its transaction ends, and
-- nobody waits for that lock; an end that does not hold raises an error, so that the transaction cannot be committed.
--
-- SQLSTATEs: IB001 the claim is not here, IB002 it is somebody else's by now, IB003 the claim was made in another
-- transaction, IB004 it is complete already, IB005 somebody else is or was there (run_tx looks what that is).

-- What a claim found. outcome:
--   run      go on: do the work, then ibid.complete() with this token
--   done     it was done before; this was the answer
--   opaque   it was done before, and only ibid can read the answer
--   busy     somebody is at it: roll back, and come back later
--   unknown  somebody was at it, and nobody knows how that ended
--   reused   the key belongs to another request
--   spent    this token was released
--   new      nothing is there (ibid.seen only)
CREATE TYPE ibid.answer AS (
    outcome     text,
    token       bytea,
    attempt     integer,
    fence       bigint,
    -- Of the answer that was remembered.
    failed      boolean,
    status      integer,
    -- Name to value, or to a list of values.
    headers     jsonb,
    -- NULL if it is not kept, or was too large to be kept: then its length and SHA-256 are.
    body        bytea,
    body_length bigint,
    body_sha256 bytea,
    -- As it is stored, of what is opaque.
    record      bytea
);

-- Little-endian, in eight bytes; what is measured is shorter than 4 GiB.
CREATE FUNCTION ibid._le8(n bigint) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT set_byte(set_byte(set_byte(set_byte('\x0000000000000000'::bytea,
        0, (n & 255)::integer), 1, ((n >> 8) & 255)::integer), 2, ((n >> 16) & 255)::integer),
        3, ((n >> 24) & 255)::integer)
$$;

CREATE FUNCTION ibid._frame(tag text, value bytea) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$
    SELECT convert_to(tag, 'UTF8') || ibid._le8(octet_length(value)) || value
$$;

-- The credential headers of a request, as the gateway and the layer frame them: names to values, such as
-- {"Authorization": "Bearer 7f3a", "X-Api-Key": "k"}. A header that is empty is as good as none.
CREATE FUNCTION ibid.credentials(headers jsonb) RETURNS bytea
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ibid._frame('c', coalesce(string_agg(
        ibid._frame('n', convert_to(lower(h.key), 'UTF8')) || ibid._frame('v', convert_to(h.value, 'UTF8')), ''::bytea
        ORDER BY lower(h.key) COLLATE "C"), ''::bytea))
    FROM jsonb_each_text(headers) h WHERE h.value <> ''
$$;

-- One part of a scope, as the gateway and the layer frame it. 'value' is a plain one; 'credential' is Authorization alone;
-- 'missing' is an optional part that is not there, whatever its value.
CREATE FUNCTION ibid.part(kind text, value text) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    tag text := CASE kind WHEN 'value' THEN 'v' WHEN 'credential' THEN 'c' WHEN 'cookie' THEN 'o' WHEN 'header' THEN 'h'
        WHEN 'jwt' THEN 'j' WHEN 'host' THEN 'H' WHEN 'method' THEN 'm' WHEN 'path' THEN 'p' WHEN 'route' THEN 'r'
        WHEN 'global' THEN 'g' WHEN 'missing' THEN '-' END;
BEGIN
    IF tag IS NULL OR value IS NULL THEN
        RAISE EXCEPTION 'a scope has no part % with the value %', coalesce(quote_literal(kind), 'NULL'),
            coalesce(quote_literal(value), 'NULL')
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'value, credential, cookie, header, jwt, host, method, path, route, global and missing are parts';
    END IF;
    RETURN CASE kind
        WHEN 'credential' THEN ibid.credentials(jsonb_build_object('authorization', value))
        WHEN 'missing' THEN ibid._frame(tag, ''::bytea)
        -- Without the port.
        WHEN 'host' THEN ibid._frame(tag, convert_to(
            lower(regexp_replace(value, '^([^:]*|\[.*\]):[0-9]*$', '\1')), 'UTF8'))
        ELSE ibid._frame(tag, convert_to(value, 'UTF8')) END;
END $$;

-- Where a key lives in a scope that was put together from parts.
CREATE FUNCTION ibid.address_in(scope bytea, key text) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF scope IS NULL OR coalesce(key, '') = '' THEN
        RAISE EXCEPTION 'an address needs a scope and a key that is not empty'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN sha256('\x02'::bytea || scope || ibid._frame('k', convert_to(key, 'UTF8')));
END $$;

-- Where a key lives in a scope of plain values, such as ARRAY['acme', 'payments'].
CREATE FUNCTION ibid.address(scope text[], key text) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    framed bytea := '';
    part text;
BEGIN
    FOREACH part IN ARRAY scope LOOP
        framed := framed || ibid.part('value', part);
    END LOOP;
    RETURN ibid.address_in(framed, key);
END $$;

-- What makes two requests the same: these bytes.
CREATE FUNCTION ibid.fingerprint(request bytea) RETURNS bytea
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN sha256(ibid._frame('r', request));
END $$;

CREATE FUNCTION ibid._lock(address bytea) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT ('x' || encode(substr(address, 1, 8), 'hex'))::bit(64)::bigint $$;

-- Clamped, as the store does.
CREATE FUNCTION ibid._span_us(span interval) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT least(greatest(extract(epoch FROM span) * 1000000, 0), 315576000000000000)::bigint $$;

-- What a whole key is found by, as the gateway and the layer hash it.
CREATE FUNCTION ibid._key_hash(key text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN coalesce(key, '') = '' THEN ''
           ELSE left(encode(sha256(convert_to('ibid key ' || key, 'UTF8')), 'hex'), 16) END
$$;

CREATE FUNCTION ibid._ask(
    address bytea, token bytea, version smallint, fingerprint bytea, tenant text, user_id text, endpoint text, key text,
    key_hash text, hold_us bigint, keep_us bigint, OUT ask ibid.idempotency_keys)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    ask.address := address;
    ask.token := token;
    ask.fingerprint_version := version;
    ask.fingerprint := fingerprint;
    ask.tenant := left(coalesce(tenant, ''), 1024);
    ask.user_id := left(coalesce(user_id, ''), 1024);
    ask.endpoint := left(coalesce(endpoint, ''), 1024);
    ask.key := left(coalesce(key, ''), 1024);
    ask.key_hash := coalesce(key_hash, '');
    ask.label := '';
    ask.hold_us := hold_us;
    ask.keep_us := keep_us;
    ask.fence := 0;
    ask.attempt := 0;
    ask.took_over := false;
    ask.lapsed := false;
    ask.released := false;
    ask.resolved := false;
    ask.waited := false;
END $$;

-- Claims in the caller's transaction. `locked`: somebody is at it in a transaction that has not ended.
CREATE FUNCTION ibid._tx_claim(ask ibid.idempotency_keys, over bigint, OUT locked boolean, OUT answer ibid._answer)
LANGUAGE plpgsql AS $$
DECLARE
    r ibid.idempotency_keys;
    was_there boolean;
    at timestamptz;
    given bigint;
    higher bigint;
BEGIN
    locked := false;
    -- Without the lock first: what is done needs none.
    SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = ask.address;
    was_there := FOUND;
    IF was_there THEN
        answer := ibid._refused(r, ask, over, clock_timestamp());
        IF answer.found IS NOT NULL THEN
            RETURN;
        END IF;
    END IF;
    IF NOT pg_try_advisory_xact_lock(ibid._lock(ask.address)) THEN
        locked := true;
        RETURN;
    END IF;
    IF NOT was_there THEN
        -- By far most claims find nothing: written out, because rows as values take longer than all the rest.
        at := clock_timestamp();
        INSERT INTO ibid.idempotency_keys (
            address, state, tenant, user_id, endpoint, key, key_hash, label, attempt, fence, token, fingerprint_version,
            fingerprint, claimed_at, lease_until, expires_at, sweep_at, hold_us, keep_us)
        VALUES (
            ask.address, 'processing', ask.tenant, ask.user_id, ask.endpoint, ask.key, ask.key_hash, ask.label, 1,
            ibid._clock_us(at), ask.token, ask.fingerprint_version, ask.fingerprint, at, ibid._after(at, ask.hold_us),
            ibid._after(ibid._after(at, ask.hold_us), ask.keep_us),
            ibid._after(ibid._after(at, ask.hold_us), ask.keep_us), ask.hold_us, ask.keep_us)
        ON CONFLICT DO NOTHING
        RETURNING fence INTO given;
        IF FOUND THEN
            -- Only now, when the row is ours: what was there before may have been swept while we waited for it.
            SELECT m.fence_high + 1 INTO higher FROM ibid.meta m;
            IF higher > given THEN
                given := higher;
                UPDATE ibid.idempotency_keys k SET fence = given WHERE k.address = ask.address;
            END IF;
            answer := ROW(NULL, 1, given, 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                          NULL)::ibid._answer;
            RETURN;
        END IF;
    END IF;
    answer := ibid._claim(ask, over);
END $$;

-- Completes in the caller's transaction, or raises. How: a record, or headers and body.
CREATE FUNCTION ibid._tx_complete(
    at_address bytea, of_token bytea, of_fence bigint, failed boolean, record bytea, status integer, headers jsonb,
    body bytea, requested_ms bigint, completed_ms bigint, took_us bigint, keep_us bigint, is_repeatable boolean)
RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    r ibid.idempotency_keys;
    at timestamptz;
BEGIN
    -- By far most are the first answer of one who runs, with nobody waiting: one statement.
    UPDATE ibid.idempotency_keys k SET
        state = CASE WHEN _tx_complete.failed THEN 'failed' ELSE 'done' END, record = _tx_complete.record,
        status = _tx_complete.status, headers = _tx_complete.headers, body = _tx_complete.body, takeover_at = NULL,
        requested_at = CASE WHEN requested_ms IS NULL THEN date_trunc('milliseconds', k.claimed_at)
                            ELSE ibid._after('epoch', requested_ms * 1000) END,
        completed_at = CASE WHEN completed_ms IS NULL THEN date_trunc('milliseconds', clock_timestamp())
                            ELSE ibid._after('epoch', completed_ms * 1000) END,
        took = coalesce(took_us, ibid._us(clock_timestamp() - k.claimed_at)) * interval '1 microsecond',
        expires_at = ibid._after(clock_timestamp(), coalesce(_tx_complete.keep_us, k.keep_us)),
        sweep_at = CASE WHEN ibid._after(clock_timestamp(), coalesce(_tx_complete.keep_us, k.keep_us) * 9 / 8) < k.sweep_at
                        THEN ibid._after(clock_timestamp(), coalesce(_tx_complete.keep_us, k.keep_us)) ELSE k.sweep_at END
    WHERE k.address = at_address AND k.token = of_token AND (of_fence = 0 OR k.fence = of_fence)
        AND k.state = 'processing' AND clock_timestamp() < k.expires_at AND k.spent IS NULL AND NOT k.waited;
    IF FOUND THEN
        RETURN;
    END IF;
    SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = at_address FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the claim to be completed is not in this database' USING ERRCODE = 'IB001',
            HINT = 'it was rolled back, or the claim was made in another store than this one';
    END IF;
    at := clock_timestamp();
    IF r.token <> of_token OR (of_fence <> 0 AND r.fence <> of_fence) OR at >= r.expires_at OR r.resolved
        OR r.released OR r.state = 'free' THEN
        RAISE EXCEPTION 'the claim to be completed was lost: it was taken over, released or forgotten'
            USING ERRCODE = 'IB002', HINT = 'roll back';
    END IF;
    IF r.state IN ('done', 'failed') THEN
        IF is_repeatable THEN
            RETURN;
        END IF;
        RAISE EXCEPTION 'the claim is complete already' USING ERRCODE = 'IB004', HINT = 'complete it once';
    END IF;
    PERFORM ibid._wake(r);
    r.waited := false;
    r := ibid._end(r, at, 0::smallint, failed, record, status, coalesce(requested_ms, ibid._clock_us(r.claimed_at) / 1000),
                   coalesce(completed_ms, ibid._clock_us(at) / 1000), coalesce(took_us, ibid._us(at - r.claimed_at)),
                   coalesce(keep_us, r.keep_us), NULL);
    r.headers := headers;
    r.body := body;
    PERFORM ibid._put(r, true);
END $$;

-- What marks a run: its token and its transaction. As the setting ibid.run it stays for the session if the transaction is
-- committed, and is gone if it is rolled back.
CREATE FUNCTION ibid._run_mark(token bytea) RETURNS text LANGUAGE sql VOLATILE
AS $$ SELECT encode(token, 'hex') || ':' || pg_current_xact_id()::text $$;

-- After so much silence inside the transaction the server ends it, and with it the lock; a caller whose machine is gone would
-- otherwise keep its key until TCP gives up.
CREATE FUNCTION ibid._limit_idle(idle_ms bigint) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    -- As people write it: '0', '90s', '2min'.
    idle text := current_setting('idle_in_transaction_session_timeout');
BEGIN
    IF idle = '0' OR extract(epoch FROM idle::interval) * 1000 > idle_ms THEN
        RETURN set_config('idle_in_transaction_session_timeout', least(idle_ms, 2147483647)::text, true);
    END IF;
    RETURN idle;
END $$;

-- Raises unless this is the transaction in which the claim was made.
CREATE FUNCTION ibid._check_run(token bytea) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('ibid.run', true) IS DISTINCT FROM ibid._run_mark(token) THEN
        RAISE EXCEPTION 'the transaction of the claim was ended before its answer was recorded' USING ERRCODE = 'IB003',
            HINT = 'neither COMMIT nor ROLLBACK inside: the transaction is ended by who began it';
    END IF;
END $$;

-- Begins a run of run_tx where nothing is there, which is by far the most frequent case. It writes nothing: the row is made
-- by _run_finish, in the same transaction. Otherwise it is false, or raises IB005 for drivers that cannot read the result of
-- a statement that travels with BEGIN. (Neither of the two sets anything for itself: that costs more than all they do. An
-- assignment is evaluated at once, where PERFORM would start the executor.)
CREATE FUNCTION ibid._run_begin(at_address bytea, token bytea, idle_ms bigint, raises boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    found_address bytea;
    setting text;
BEGIN
    -- The lock first: who held it has committed by then, and only a later look sees that.
    IF pg_try_advisory_xact_lock(ibid._lock(at_address)) THEN
        SELECT k.address INTO found_address FROM ibid.idempotency_keys k WHERE k.address = at_address;
        IF found_address IS NULL THEN
            setting := set_config('ibid.run', ibid._run_mark(token), false);
            setting := ibid._limit_idle(idle_ms);
            RETURN true;
        END IF;
    END IF;
    IF raises THEN
        RAISE EXCEPTION 'the key is in use or was used before' USING ERRCODE = 'IB005';
    END IF;
    RETURN false;
END $$;

-- A run and what is said of its answer, as run_tx writes them: one constant, because each argument of a call takes the server
-- longer to analyse and plan than to store.
CREATE TYPE ibid._finished_run AS (
    address      bytea,
    token        bytea,
    version      smallint,
    fingerprint  bytea,
    tenant       text,
    user_id      text,
    endpoint     text,
    key          text,
    key_hash     text,
    hold_us      bigint,
    keep_us      bigint,
    failed       boolean,
    status       integer,
    requested_ms bigint,
    completed_ms bigint,
    took_us      bigint
);

-- The row of a run of _run_begin, with its answer. Raises if a gateway has made one meanwhile.
CREATE FUNCTION ibid._run_finish(r ibid._finished_run, record bytea) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    at timestamptz := clock_timestamp();
    ends timestamptz := at + r.keep_us * interval '1 microsecond';
    clock bigint := (extract(epoch FROM at) * 1000000)::bigint;
BEGIN
    IF current_setting('ibid.run', true) IS DISTINCT FROM ibid._run_mark(r.token) THEN
        PERFORM ibid._check_run(r.token);
    END IF;
    INSERT INTO ibid.idempotency_keys (
        address, state, tenant, user_id, endpoint, key, key_hash, label, attempt, fence, token, fingerprint_version,
        fingerprint, claimed_at, lease_until, expires_at, sweep_at, hold_us, keep_us, record, status, requested_at,
        completed_at, took)
    VALUES (r.address, CASE WHEN r.failed THEN 'failed' ELSE 'done' END, r.tenant, r.user_id, r.endpoint, r.key, r.key_hash,
        '', 1, greatest(clock, (SELECT m.fence_high + 1 FROM ibid.meta m)), r.token, r.version, r.fingerprint, at,
        at + r.hold_us * interval '1 microsecond', ends, ends, r.hold_us, r.keep_us, _run_finish.record, r.status,
        timestamptz 'epoch' + r.requested_ms * interval '1 millisecond',
        timestamptz 'epoch' + r.completed_ms * interval '1 millisecond', r.took_us * interval '1 microsecond')
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'a gateway has claimed this key while the transaction ran' USING
            ERRCODE = 'serialization_failure', HINT = 'roll back, and run it again';
    END IF;
END $$;

-- After IB003: if the operation has committed the transaction of _run_begin itself, what it did is there without an answer. The
-- claim is then made belatedly, so that it is not run again: its lease lapses, and nobody knows how it ended.
CREATE FUNCTION ibid._run_lost(
    address bytea, token bytea, version smallint, fingerprint bytea, tenant text, user_id text, endpoint text, key text,
    key_hash text, hold_us bigint, keep_us bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF split_part(current_setting('ibid.run', true), ':', 1) = encode(token, 'hex') THEN
        PERFORM ibid._tx_claim(
            ibid._ask(address, token, version, fingerprint, tenant, user_id, endpoint, key, key_hash, hold_us, keep_us),
            NULL);
    END IF;
END $$;

-- What a run finds. Nothing: it may begin. `is_ours`: the row is of this token.
CREATE FUNCTION ibid._run_look(
    at_address bytea, of_token bytea, over bigint, OUT locked boolean, OUT is_ours boolean, OUT answer ibid._answer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r ibid.idempotency_keys;
    ask ibid.idempotency_keys;
BEGIN
    SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = at_address;
    IF FOUND THEN
        ask.token := of_token;
        is_ours := r.token = of_token;
        answer := ibid._refused(r, ask, over, clock_timestamp());
    END IF;
    locked := answer.found IS NULL AND NOT pg_try_advisory_xact_lock(ibid._lock(at_address));
END $$;

-- Claims for a run of run_tx where somebody was before: the row is changed at once.
CREATE FUNCTION ibid._run_claim(
    address bytea, token bytea, version smallint, fingerprint bytea, tenant text, user_id text, endpoint text, key text,
    key_hash text, hold_us bigint, keep_us bigint, over bigint, idle_ms bigint, OUT locked boolean, OUT is_ours boolean,
    OUT answer ibid._answer)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    claimed record;
BEGIN
    SELECT * INTO claimed FROM ibid._tx_claim(
        ibid._ask(address, token, version, fingerprint, tenant, user_id, endpoint, key, key_hash, hold_us, keep_us), over);
    locked := claimed.locked;
    answer := claimed.answer;
    is_ours := false;
    IF answer.found = 1 THEN
        PERFORM set_config('ibid.run', ibid._run_mark(token), false), ibid._limit_idle(idle_ms);
    END IF;
END $$;

-- Completes a claim of _run_claim, in its transaction, or a layer's for complete_in (then `in_run` is false). It has few
-- settings, because each costs as much as part of the UPDATE.
CREATE FUNCTION ibid._run_complete(
    address bytea, token bytea, fence bigint, in_run boolean, failed boolean, record bytea, status integer,
    requested_ms bigint, completed_ms bigint, took_us bigint, keep_us bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' SET enable_seqscan = off AS $$
BEGIN
    IF in_run THEN
        PERFORM ibid._check_run(token);
    END IF;
    PERFORM ibid._tx_complete(address, token, fence, failed, record, status, NULL, NULL, requested_ms, completed_ms,
                              took_us, keep_us, false);
END $$;

CREATE FUNCTION ibid._u16(b bytea, at integer) RETURNS integer LANGUAGE sql IMMUTABLE
AS $$ SELECT get_byte(b, at) | (get_byte(b, at + 1) << 8) $$;

CREATE FUNCTION ibid._u32(b bytea, at integer) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT ibid._u16(b, at)::bigint | (ibid._u16(b, at + 2)::bigint << 16) $$;

-- Reads a record of version 1 or 2. Its checksum is not verified: that would take longer than all the rest.
CREATE FUNCTION ibid._read(
    written bytea, OUT is_readable boolean, OUT status integer, OUT names text[], OUT vals text[], OUT body bytea,
    OUT body_length bigint, OUT body_sha256 bytea)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    -- One flat copy: a stored one would be fetched anew at every look.
    b bytea := written || ''::bytea;
    kind integer;
    at integer := 20;
    n integer;
    value bytea;
BEGIN
    is_readable := false;
    IF octet_length(b) < 28 OR get_byte(b, 0) NOT IN (1, 2) THEN
        RETURN;
    END IF;
    kind := get_byte(b, 1);
    status := ibid._u16(b, 2);
    FOR nth IN 1..ibid._u16(b, at) LOOP
        n := ibid._u16(b, at + 2);
        names := names || convert_from(substr(b, at + 5, n), 'UTF8');
        at := at + 2 + n;
        n := ibid._u32(b, at + 2);
        value := substr(b, at + 7, n);
        at := at + 4 + n;
        BEGIN
            vals := vals || convert_from(value, 'UTF8');
        EXCEPTION WHEN character_not_in_repertoire THEN
            vals := vals || convert_from(value, 'LATIN1');
        END;
    END LOOP;
    at := at + 2;
    IF kind = 0 THEN
        n := ibid._u32(b, at);
        body := substr(b, at + 5, n);
        at := at + 4 + n;
    ELSIF kind = 1 THEN
        body_length := ibid._u32(b, at) | (ibid._u32(b, at + 4) << 32);
        body_sha256 := substr(b, at + 9, 32);
        at := at + 40;
    END IF;
    -- What follows the body is passed over, and must end where the checksum begins.
    FOR nth IN 1..ibid._u16(b, at) LOOP
        at := at + 2 + ibid._u16(b, at + 2);
        at := at + 4 + ibid._u32(b, at + 2)::integer;
    END LOOP;
    at := at + 2;
    IF get_byte(b, 0) = 2 THEN
        at := at + 2 + 32 * ibid._u16(b, at);
    END IF;
    is_readable := kind <= 2 AND status BETWEEN 100 AND 999 AND at + 4 = octet_length(b);
EXCEPTION
    -- It ends too early, or its numbers are too large: no record of ours.
    WHEN data_exception OR array_subscript_error OR numeric_value_out_of_range OR character_not_in_repertoire THEN
        is_readable := false;
END $$;

-- What is told of what was found. A fingerprint of NULL is compared with nothing.
CREATE FUNCTION ibid._told(a ibid._answer, of_fingerprint bytea, OUT told ibid.answer)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    read record;
    names text[] := a.header_names;
    vals text[] := a.header_values;
BEGIN
    told.attempt := a.attempt;
    told.fence := a.fence;
    told.outcome := CASE coalesce(a.found, 0::smallint) WHEN 0 THEN 'new' WHEN 1 THEN 'run' WHEN 2 THEN 'busy'
        WHEN 3 THEN 'unknown' WHEN 4 THEN 'done' ELSE 'spent' END;
    IF a.found IN (2, 3, 4) AND (a.fingerprint <> of_fingerprint OR (of_fingerprint IS NOT NULL AND a.fingerprint_version NOT IN (1, 3)))
    THEN
        -- Nothing of another request's answer.
        told := NULL;
        told.outcome := 'reused';
        RETURN;
    ELSIF told.outcome <> 'done' THEN
        RETURN;
    END IF;
    told.failed := a.failed;
    told.status := a.status;
    told.body := a.body;
    IF a.record IS NOT NULL THEN
        SELECT * INTO read FROM ibid._read(a.record);
        IF NOT read.is_readable THEN
            told.outcome := 'opaque';
            told.record := a.record;
            RETURN;
        END IF;
        told.status := read.status;
        told.body := read.body;
        told.body_length := read.body_length;
        told.body_sha256 := read.body_sha256;
        names := read.names;
        vals := read.vals;
    END IF;
    SELECT coalesce(jsonb_object_agg(h.name, CASE WHEN jsonb_array_length(h.vals) = 1 THEN h.vals -> 0 ELSE h.vals END), '{}')
    INTO told.headers
    FROM (SELECT u.name, jsonb_agg(u.value ORDER BY u.nth) AS vals
          FROM unnest(names, vals) WITH ORDINALITY AS u(name, value, nth) GROUP BY u.name) h;
END $$;

-- Claims a key in the caller's transaction. If the outcome is 'run', do the work, complete() and commit: all of it takes
-- place, or nothing. Rolling back releases the claim. A fingerprint of NULL means that requests are not compared.
--
-- A transaction that commits without completing leaves the claim to its lease, as a gateway's would be; with
-- take_over => true a claim whose lease has lapsed may be run again.
CREATE FUNCTION ibid.claim(
    address bytea, fingerprint bytea DEFAULT NULL, ttl interval DEFAULT '24 hours', lease interval DEFAULT '1 minute',
    take_over boolean DEFAULT false, tenant text DEFAULT '', user_id text DEFAULT '', endpoint text DEFAULT '',
    key text DEFAULT '', token bytea DEFAULT NULL) RETURNS ibid.answer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '500ms'
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    ask ibid.idempotency_keys;
    claimed record;
    a ibid._answer;
    told ibid.answer;
BEGIN
    IF octet_length(address) IS DISTINCT FROM 32 OR octet_length(fingerprint) <> 32 OR octet_length(token) <> 16 THEN
        RAISE EXCEPTION 'an address and a fingerprint have 32 bytes each, a token has 16'
            USING ERRCODE = 'invalid_parameter_value', HINT = 'make them with ibid.address() and ibid.fingerprint()';
    END IF;
    ask := ibid._ask(address, coalesce(token, uuid_send(gen_random_uuid())),
        CASE WHEN fingerprint IS NULL THEN 0::smallint ELSE 1::smallint END,
        coalesce(fingerprint, decode(repeat('00', 32), 'hex')), tenant, user_id, endpoint, key,
        ibid._key_hash(key), ibid._span_us(coalesce(lease, '1 minute')), ibid._span_us(coalesce(ttl, '24 hours')));
    SELECT * INTO claimed FROM ibid._tx_claim(ask, NULL);
    a := claimed.answer;
    told := ibid._told(a, fingerprint);
    -- Only after the requests were compared: another one must not take over.
    IF take_over AND told.outcome = 'unknown' AND a.takeover_in_us = 0 THEN
        SELECT * INTO claimed FROM ibid._tx_claim(ask, a.fence);
        a := claimed.answer;
        told := ibid._told(a, fingerprint);
    END IF;
    IF claimed.locked THEN
        told := NULL;
        told.outcome := 'busy';
    ELSIF told.outcome = 'run' THEN
        told.token := ask.token;
    END IF;
    RETURN told;
END $$;

-- Remembers the answer of a claim, for its ttl, and commits with the caller's transaction. Raises if the claim is not
-- the caller's any more; said again, it changes nothing. Headers: an object, of names to a value or a list of values.
CREATE FUNCTION ibid.complete(
    address bytea, token bytea, status integer, headers jsonb DEFAULT '{}', body bytea DEFAULT '') RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    h record;
    kept jsonb := '{}';
BEGIN
    IF status IS NULL OR status NOT BETWEEN 200 AND 999 OR token IS NULL THEN
        RAISE EXCEPTION 'a remembered answer has a status between 200 and 999, and is completed by its token'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF jsonb_typeof(coalesce(headers, '{}')) <> 'object' THEN
        RAISE EXCEPTION 'headers are an object of names to values'
            USING ERRCODE = 'invalid_parameter_value', HINT = '{"content-type": "application/json"}';
    END IF;
    -- What could not be replayed is refused now, not when it is asked for.
    FOR h IN SELECT lower(e.key) AS name, e.value FROM jsonb_each(coalesce(headers, '{}')) e LOOP
        IF h.name !~ '^[!#$%&''*+.^_`|~0-9a-z-]+$' OR h.value::text ~ '\\u0000' OR (SELECT bool_or(
            jsonb_typeof(v.value) <> 'string' OR v.value #>> '{}' ~ '[\u0001-\u0008\u000a-\u001f\u007f]')
            FROM jsonb_array_elements(CASE jsonb_typeof(h.value) WHEN 'array' THEN h.value
                                      ELSE jsonb_build_array(h.value) END) v)
        THEN
            RAISE EXCEPTION 'the header % with the value % is none', quote_ident(h.name), h.value
                USING ERRCODE = 'invalid_parameter_value', HINT = 'values are strings, or lists of strings';
        END IF;
        -- As the gateway: what belongs to one connection, one client or one moment is not remembered.
        IF h.name NOT IN ('set-cookie', 'date', 'content-length', 'connection', 'keep-alive', 'proxy-connection',
            'proxy-authenticate', 'proxy-authorization', 'te', 'transfer-encoding', 'upgrade') THEN
            kept := kept || jsonb_build_object(h.name, h.value);
        END IF;
    END LOOP;
    PERFORM ibid._tx_complete(address, token, 0, status >= 400, NULL, status, kept, coalesce(body, ''), NULL, NULL,
                              NULL, NULL, true);
END $$;

-- Gives a claim back that was committed without an answer. In one transaction with its claim, ROLLBACK does.
CREATE FUNCTION ibid.release(address bytea, token bytea) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s'
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET jit = off AS $$
DECLARE
    a ibid._answer;
BEGIN
    IF octet_length(address) IS DISTINCT FROM 32 OR octet_length(token) IS DISTINCT FROM 16 THEN
        RAISE EXCEPTION 'an address has 32 bytes, a token has 16' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    a := ibid._settle(
        ibid._ask(address, token, 0::smallint, decode(repeat('00', 32), 'hex'), '', '', '', '', '', 0, 0),
        NULL, 1::smallint, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
    RETURN a.held = 0;
END $$;

-- What a claim would find, without claiming.
CREATE FUNCTION ibid.seen(address bytea, fingerprint bytea DEFAULT NULL) RETURNS ibid.answer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ibid._told(ibid._get(address), fingerprint);
END $$;

-- Removes what has expired, and says how many rows that were. Call it again while it returns at_most.
CREATE FUNCTION ibid.cleanup(at_most integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ibid.cleanup_old_idempotency_keys(at_most);
END $$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ibid FROM PUBLIC;
