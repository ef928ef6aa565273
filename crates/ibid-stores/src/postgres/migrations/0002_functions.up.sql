-- What the store calls. Every name that begins with an underscore is its own business and may change.
--
-- Rules that hold throughout: only clock_timestamp() decides, and it is read after the row's lock was taken; a call
-- that changes nothing writes nothing; many rows are visited in the order of their addresses, so that no two calls
-- wait for each other.

-- What a call found. held: 0 held, 1 restored, 2 lost. found: 0 nothing, 1 granted, 2 busy, 3 unknown, 4 done, 5 spent.
CREATE TYPE ibid._answer AS (
    held                smallint,
    found               smallint,
    fence               bigint,
    attempt             integer,
    fingerprint_version smallint,
    fingerprint         bytea,
    age_us              bigint,
    takeover_in_us      bigint,
    expires_in_us       bigint,
    failed              boolean,
    record              bytea,
    status              integer,
    header_names        text[],
    header_values       text[],
    body                bytea,
    requested_ms        bigint,
    completed_ms        bigint
);

CREATE FUNCTION ibid._us(span interval) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT (extract(epoch FROM span) * 1000000)::bigint $$;

-- Microseconds since the epoch. (Stable, as what it calls: otherwise it is not inlined.)
CREATE FUNCTION ibid._clock_us(at timestamptz) RETURNS bigint LANGUAGE sql STABLE
AS $$ SELECT (extract(epoch FROM at) * 1000000)::bigint $$;

CREATE FUNCTION ibid._after(at timestamptz, us bigint) RETURNS timestamptz LANGUAGE sql STABLE
AS $$ SELECT at + us * interval '1 microsecond' $$;

-- How long a released token is remembered: a minute, or as long as its holder might have been silent.
CREATE FUNCTION ibid._spent_for(hold_us bigint) RETURNS bigint LANGUAGE sql IMMUTABLE
AS $$ SELECT greatest(60000000, hold_us) $$;

CREATE FUNCTION ibid._is_spent(r ibid.idempotency_keys, token bytea, at timestamptz) RETURNS boolean
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RETURN r.spent IS NOT NULL AND EXISTS (
        SELECT FROM unnest(r.spent, r.spent_until) AS s(token, until) WHERE s.token = $2 AND at < s.until);
END $$;

-- Of the spent tokens those that must still be remembered: at most 32, the oldest go first.
CREATE FUNCTION ibid._trim_spent(INOUT r ibid.idempotency_keys, at timestamptz)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF r.spent IS NOT NULL THEN
        SELECT array_agg(s.token ORDER BY s.nth), array_agg(s.until ORDER BY s.nth) INTO r.spent, r.spent_until
        FROM (SELECT token, until, nth FROM unnest(r.spent, r.spent_until) WITH ORDINALITY AS u(token, until, nth)
              WHERE at < until ORDER BY nth DESC LIMIT 32) s;
    END IF;
END $$;

-- What is remembered as spent here once somebody else is the holder.
CREATE FUNCTION ibid._hand_on_spent(INOUT r ibid.idempotency_keys, at timestamptz)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF r.state = 'free' OR r.released THEN
        r.spent := r.spent || r.token;
        r.spent_until := r.spent_until || r.expires_at;
    END IF;
    r := ibid._trim_spent(r, at);
END $$;

CREATE FUNCTION ibid._delete_after(r ibid.idempotency_keys) RETURNS timestamptz
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN r.spent_until IS NULL THEN r.expires_at
           ELSE greatest(r.expires_at, (SELECT max(until) FROM unnest(r.spent_until) AS u(until))) END
$$;

-- What somebody else's claim finds here, and what a holder that lost its claim is told.
CREATE FUNCTION ibid._view(r ibid.idempotency_keys, at timestamptz) RETURNS ibid._answer
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    a ibid._answer;
    takeover timestamptz;
BEGIN
    a.held := 2;
    a.fence := r.fence;
    a.attempt := r.attempt;
    a.fingerprint_version := r.fingerprint_version;
    a.fingerprint := r.fingerprint;
    IF r.state = 'free' THEN
        a.found := 5;
    ELSIF r.state IN ('done', 'failed') THEN
        a.found := 4;
        a.failed := r.state = 'failed';
        a.expires_in_us := greatest(0, ibid._us(r.expires_at - at));
        a.record := r.record;
        IF r.record IS NULL THEN
            a.status := r.status;
            a.body := r.body;
            a.requested_ms := ibid._clock_us(r.requested_at) / 1000;
            a.completed_ms := ibid._clock_us(r.completed_at) / 1000;
            SELECT array_agg(h.name ORDER BY h.nth, v.nth), array_agg(v.value ORDER BY h.nth, v.nth)
            INTO a.header_names, a.header_values
            FROM jsonb_each(r.headers) WITH ORDINALITY AS h(name, value, nth),
                 jsonb_array_elements_text(CASE jsonb_typeof(h.value) WHEN 'array' THEN h.value
                                           ELSE jsonb_build_array(h.value) END) WITH ORDINALITY AS v(value, nth);
        END IF;
    ELSE
        takeover := CASE WHEN r.state = 'processing' OR r.lapsed THEN r.lease_until ELSE r.takeover_at END;
        a.found := CASE WHEN r.state = 'processing' AND at < r.lease_until THEN 2 ELSE 3 END;
        a.age_us := greatest(0, ibid._us(at - r.claimed_at));
        a.takeover_in_us := greatest(0, ibid._us(takeover - at));
    END IF;
    RETURN a;
END $$;

-- A fence above all that were ever given here.
CREATE FUNCTION ibid._next_fence(before bigint, at timestamptz) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN greatest(ibid._clock_us(at), before + 1, (SELECT m.fence_high + 1 FROM ibid.meta m));
END $$;

-- A row's fence will not be seen in the table any more. (Bounded, so that a wrong one cannot use up all fences.)
CREATE FUNCTION ibid._remember_fence(fence bigint) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE ibid.meta m SET fence_high = least(fence, 4611686018427387904)
    WHERE m.fence_high < least(fence, 4611686018427387904);
END $$;

CREATE FUNCTION ibid._wake(r ibid.idempotency_keys) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF r.waited THEN
        PERFORM pg_notify('ibid_wake', encode(r.address, 'hex') || ':' || r.fence);
    END IF;
END $$;

-- Writes a row that is locked, or makes it. False if somebody else made it meanwhile.
CREATE FUNCTION ibid._put(r ibid.idempotency_keys, is_there boolean) RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    due timestamptz := ibid._delete_after(r);
BEGIN
    IF r.sweep_at IS NULL OR due + (due - clock_timestamp()) / 8 < r.sweep_at THEN
        r.sweep_at := due;
    END IF;
    IF NOT is_there THEN
        INSERT INTO ibid.idempotency_keys SELECT r.* ON CONFLICT DO NOTHING;
        RETURN FOUND;
    END IF;
    UPDATE ibid.idempotency_keys k SET
        state = r.state, tenant = r.tenant, user_id = r.user_id, endpoint = r.endpoint, key = r.key,
        key_hash = r.key_hash, tags = r.tags, label = r.label, attempt = r.attempt, fence = r.fence, token = r.token,
        fingerprint_version = r.fingerprint_version, fingerprint = r.fingerprint, claimed_at = r.claimed_at,
        lease_until = r.lease_until, takeover_at = r.takeover_at, expires_at = r.expires_at,
        sweep_at = r.sweep_at, hold_us = r.hold_us, keep_us = r.keep_us, took_over = r.took_over,
        lapsed = r.lapsed, released = r.released, resolved = r.resolved, waited = r.waited, spent = r.spent,
        spent_until = r.spent_until, record = r.record, status = r.status, headers = r.headers, body = r.body,
        requested_at = r.requested_at, completed_at = r.completed_at, took = r.took
    WHERE k.address = r.address;
    RETURN FOUND;
END $$;

-- The row of somebody who asks, running from now on.
CREATE FUNCTION ibid._begin(
    ask ibid.idempotency_keys, before ibid.idempotency_keys, at timestamptz, OUT r ibid.idempotency_keys)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    r := ask;
    r.state := 'processing';
    r.claimed_at := at;
    r.lease_until := ibid._after(at, ask.hold_us);
    r.expires_at := ibid._after(r.lease_until, ask.keep_us);
    r.attempt := 1;
    IF before.address IS NOT NULL THEN
        IF at < before.expires_at THEN
            r.attempt := least(before.attempt, 2147483646) + 1;
            r.took_over := before.state <> 'free';
        END IF;
        before := ibid._hand_on_spent(before, at);
        r.spent := before.spent;
        r.spent_until := before.spent_until;
    END IF;
END $$;

-- Of a row that is there: what this claim finds, or NULL if it is granted.
CREATE FUNCTION ibid._refused(r ibid.idempotency_keys, ask ibid.idempotency_keys, over bigint, at timestamptz)
RETURNS ibid._answer
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    a ibid._answer;
    same boolean := r.token = ask.token;
BEGIN
    IF ibid._is_spent(r, ask.token, at) THEN
        a.found := 5;
        RETURN a;
    END IF;
    IF at >= r.expires_at THEN
        RETURN NULL;
    END IF;
    IF same AND (r.state = 'processing' OR r.lapsed) THEN
        a.found := 1;
        a.fence := r.fence;
        a.attempt := r.attempt;
        RETURN a;
    END IF;
    IF same AND (r.state = 'free' OR r.released) THEN
        a.found := 5;
        RETURN a;
    END IF;
    IF r.state = 'free' THEN
        RETURN NULL;
    END IF;
    a := ibid._view(r, at);
    IF a.found = 3 AND a.takeover_in_us = 0 AND over = r.fence THEN
        RETURN NULL;
    END IF;
    RETURN a;
END $$;

CREATE FUNCTION ibid._claim(ask ibid.idempotency_keys, over bigint) RETURNS ibid._answer
LANGUAGE plpgsql AS $$
DECLARE
    r ibid.idempotency_keys;
    granted ibid.idempotency_keys;
    a ibid._answer;
    fence bigint;
    at timestamptz;
BEGIN
    -- Each round but the last means that somebody else made or removed the row in between.
    FOR round IN 1..8 LOOP
        -- Without a lock first: a replay must not write, and a lock does.
        SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = ask.address;
        at := clock_timestamp();
        IF FOUND THEN
            a := ibid._refused(r, ask, over, at);
            IF a.found IS NOT NULL THEN
                RETURN a;
            END IF;
            SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = ask.address FOR UPDATE;
            CONTINUE WHEN NOT FOUND;
            at := clock_timestamp();
            a := ibid._refused(r, ask, over, at);
            IF a.found IS NOT NULL THEN
                RETURN a;
            END IF;
            granted := ibid._begin(ask, r, at);
            granted.fence := ibid._next_fence(r.fence, at);
            PERFORM ibid._put(granted, true);
            PERFORM ibid._wake(r);
        ELSE
            r := NULL;
            granted := ibid._begin(ask, r, at);
            granted.fence := ibid._clock_us(at);
            CONTINUE WHEN NOT ibid._put(granted, false);
            -- Only now, when the row is ours: what was there before may have been swept while we waited for it.
            fence := ibid._next_fence(0, at);
            IF fence > granted.fence THEN
                granted.fence := fence;
                UPDATE ibid.idempotency_keys k SET fence = granted.fence WHERE k.address = ask.address;
            END IF;
        END IF;
        a := NULL;
        a.found := 1;
        a.fence := granted.fence;
        a.attempt := granted.attempt;
        RETURN a;
    END LOOP;
    RAISE EXCEPTION 'the row changes too fast' USING ERRCODE = 'serialization_failure';
END $$;

-- Ends the row as the end says. How: 0 complete, 1 release, 2 park.
CREATE FUNCTION ibid._end(
    INOUT r ibid.idempotency_keys, at timestamptz, how smallint, failed boolean, record bytea, status integer,
    requested_ms bigint, completed_ms bigint, took_us bigint, keep_us bigint, retry_us bigint)
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    -- The token of a released takeover stays spent, whatever becomes of the entry.
    IF r.released AND NOT ibid._is_spent(r, r.token, at) THEN
        r.spent := r.spent || r.token;
        r.spent_until := r.spent_until || r.expires_at;
    END IF;
    r.lapsed := false;
    r.released := false;
    r.resolved := false;
    r.takeover_at := NULL;
    r.record := NULL;
    r.headers := NULL;
    r.body := NULL;
    IF how = 0 THEN
        r.state := CASE WHEN failed THEN 'failed' ELSE 'done' END;
        r.record := record;
        r.status := status;
        r.requested_at := ibid._after('epoch', requested_ms * 1000);
        r.completed_at := ibid._after('epoch', completed_ms * 1000);
        r.took := took_us * interval '1 microsecond';
        r.expires_at := ibid._after(at, keep_us);
    ELSIF how = 1 THEN
        r.state := 'free';
        r.expires_at := ibid._after(at, ibid._spent_for(r.hold_us));
    ELSE
        r.state := 'unknown';
        r.takeover_at := ibid._after(at, retry_us);
        r.expires_at := ibid._after(at, keep_us);
    END IF;
END $$;

-- Extends or ends a claim. How: as above, and 3 extend (then keep_us is the hold).
CREATE FUNCTION ibid._settle(
    ask ibid.idempotency_keys, over bigint, how smallint, failed boolean, record bytea, status integer,
    requested_ms bigint, completed_ms bigint, took_us bigint, keep_us bigint, retry_us bigint) RETURNS ibid._answer
LANGUAGE plpgsql AS $$
DECLARE
    r ibid.idempotency_keys;
    fresh ibid.idempotency_keys;
    a ibid._answer;
    at timestamptz;
    running boolean;
    is_there boolean;
    was_spent boolean;
BEGIN
    FOR round IN 1..8 LOOP
        a := NULL;
        SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = ask.address FOR UPDATE;
        is_there := FOUND;
        at := clock_timestamp();
        -- Where somebody else was and has gone it is, for a holder of whom nothing is said, as if nothing were there.
        IF NOT is_there OR at >= r.expires_at OR (r.state = 'free' AND ask.fence <> 0 AND r.token <> ask.token
            AND NOT ibid._is_spent(r, ask.token, at)) THEN
            fresh := ask;
            fresh.took_over := over IS NOT NULL;
            fresh.claimed_at := at;
            fresh.lease_until := at;
            fresh.expires_at := at;
            fresh.state := 'processing';
            a.held := 1;
            IF how = 3 THEN
                fresh.lease_until := ibid._after(at, keep_us);
                fresh.expires_at := ibid._after(fresh.lease_until, ask.keep_us);
            ELSIF ask.fence = 0 THEN
                -- The claim never came: nothing to put back, but a late copy of it must find its token spent.
                fresh := ibid._end(fresh, at, 1::smallint, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
                IF how = 1 THEN
                    a.held := 0;
                ELSE
                    a.held := 2;
                    a.found := 5;
                END IF;
            ELSIF how = 1 AND over IS NOT NULL THEN
                fresh.state := 'unknown';
                fresh.released := true;
                fresh.takeover_at := at;
                fresh.expires_at := ibid._after(at, greatest(ibid._spent_for(ask.hold_us), ask.keep_us));
            ELSE
                fresh := ibid._end(fresh, at, how, failed, record, status, requested_ms, completed_ms, took_us,
                                   keep_us, retry_us);
            END IF;
            IF is_there THEN
                r := ibid._hand_on_spent(r, at);
                fresh.spent := r.spent;
                fresh.spent_until := r.spent_until;
                IF r.fence > fresh.fence THEN
                    PERFORM ibid._remember_fence(r.fence);
                END IF;
                PERFORM ibid._wake(r);
            END IF;
            CONTINUE WHEN NOT ibid._put(fresh, is_there);
            RETURN a;
        END IF;
        running := r.state = 'processing' OR r.lapsed;
        a.held := 0;
        IF r.token <> ask.token OR (r.fence <> ask.fence AND ask.fence <> 0) THEN
            was_spent := ibid._is_spent(r, ask.token, at)
                OR (r.token = ask.token AND (r.state = 'free' OR r.released));
            IF ask.fence = 0 AND how <> 3 AND NOT was_spent THEN
                -- A late copy of that claim must find its token spent, also when whoever is here has gone.
                r.spent := r.spent || ask.token;
                r.spent_until := r.spent_until || ibid._after(at, ibid._spent_for(ask.hold_us));
                r := ibid._trim_spent(r, at);
                PERFORM ibid._put(r, true);
            ELSIF ask.fence <> 0 AND how = 1 AND was_spent THEN
                RETURN a;
            END IF;
            RETURN ibid._view(r, at);
        ELSIF how = 3 THEN
            IF NOT running THEN
                RETURN ibid._view(r, at);
            END IF;
            IF r.lapsed THEN
                UPDATE ibid.unfinished_keys u SET check_at = ibid._after(at, keep_us) WHERE u.address = r.address;
            END IF;
            r.state := 'processing';
            r.lapsed := false;
            r.lease_until := ibid._after(at, keep_us);
            r.expires_at := greatest(r.expires_at, ibid._after(r.lease_until, r.keep_us));
            PERFORM ibid._put(r, true);
            RETURN a;
        ELSIF running OR (r.state = 'unknown' AND NOT r.released AND how = 0) THEN
            NULL;
        ELSIF (r.state IN ('done', 'failed') AND NOT r.resolved AND how = 0)
            OR (r.state = 'unknown' AND NOT r.released AND how = 2)
            OR ((r.released OR r.state = 'free') AND how = 1) THEN
            -- Said before, and believed then.
            RETURN a;
        ELSE
            RETURN ibid._view(r, at);
        END IF;
        PERFORM ibid._wake(r);
        r.waited := false;
        IF r.took_over AND how = 1 THEN
            r.state := 'unknown';
            r.lapsed := false;
            r.released := true;
            r.takeover_at := at;
            r.expires_at := greatest(r.expires_at, ibid._after(at, ibid._spent_for(r.hold_us)));
        ELSE
            r := ibid._end(r, at, how, failed, record, status, requested_ms, completed_ms, took_us, keep_us, retry_us);
        END IF;
        PERFORM ibid._put(r, true);
        RETURN a;
    END LOOP;
    RAISE EXCEPTION 'the row changes too fast' USING ERRCODE = 'serialization_failure';
END $$;

-- The asks of a call with many: one row each, in the order in which they are to be visited.
CREATE FUNCTION ibid._asks(
    addresses bytea[], tokens bytea[], versions smallint[], fingerprints bytea[], tenants text[], users text[],
    endpoints text[], keys text[], key_hashes text[], tags bytea[], labels bytea[], holds bigint[], keeps bigint[],
    fences bigint[], attempts integer[], OUT nth integer, OUT ask ibid.idempotency_keys) RETURNS SETOF record
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    FOR nth IN SELECT u.nth FROM unnest(addresses) WITH ORDINALITY AS u(address, nth) ORDER BY u.address, u.nth LOOP
        ask.address := addresses[nth];
        ask.token := tokens[nth];
        ask.fingerprint_version := versions[nth];
        ask.fingerprint := fingerprints[nth];
        ask.tenant := tenants[nth];
        ask.user_id := users[nth];
        ask.endpoint := endpoints[nth];
        ask.key := keys[nth];
        ask.key_hash := key_hashes[nth];
        ask.tags := tags[nth];
        ask.label := labels[nth];
        ask.hold_us := holds[nth];
        ask.keep_us := keeps[nth];
        ask.fence := fences[nth];
        ask.attempt := attempts[nth];
        ask.took_over := false;
        ask.lapsed := false;
        ask.released := false;
        ask.resolved := false;
        ask.waited := false;
        RETURN NEXT;
    END LOOP;
END $$;

-- Claims and ends that the store's own statements left: somebody is there, or was. One by one.
CREATE FUNCTION ibid._claim_many(
    addresses bytea[], tokens bytea[], versions smallint[], fingerprints bytea[], tenants text[], users text[],
    endpoints text[], keys text[], key_hashes text[], tags bytea[], labels bytea[], holds bigint[], keeps bigint[], overs bigint[],
    OUT nth integer, OUT answer ibid._answer) RETURNS SETOF record
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
    asked record;
BEGIN
    FOR asked IN SELECT a.nth, a.ask FROM ibid._asks(addresses, tokens, versions, fingerprints, tenants, users,
        endpoints, keys, key_hashes, tags, labels, holds, keeps, NULL, NULL) a
    LOOP
        nth := asked.nth;
        answer := ibid._claim(asked.ask, overs[nth]);
        RETURN NEXT;
    END LOOP;
END $$;

CREATE FUNCTION ibid._settle_many(
    addresses bytea[], tokens bytea[], versions smallint[], fingerprints bytea[], tenants text[], users text[],
    endpoints text[], keys text[], key_hashes text[], tags bytea[], labels bytea[], holds bigint[], keeps bigint[], overs bigint[],
    fences bigint[], attempts integer[], hows smallint[], faileds boolean[], records bytea[], statuses integer[],
    requested bigint[], completed bigint[], tooks bigint[], end_keeps bigint[], retries bigint[],
    OUT nth integer, OUT answer ibid._answer) RETURNS SETOF record
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
    asked record;
BEGIN
    FOR asked IN SELECT a.nth, a.ask FROM ibid._asks(addresses, tokens, versions, fingerprints, tenants, users,
        endpoints, keys, key_hashes, tags, labels, holds, keeps, fences, attempts) a
    LOOP
        nth := asked.nth;
        answer := ibid._settle(asked.ask, overs[nth], hows[nth], faileds[nth], records[nth], statuses[nth], requested[nth],
                               completed[nth], tooks[nth], end_keeps[nth], retries[nth]);
        RETURN NEXT;
    END LOOP;
END $$;

CREATE FUNCTION ibid._get(at_address bytea) RETURNS ibid._answer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r ibid.idempotency_keys;
    a ibid._answer;
    at timestamptz;
BEGIN
    SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = at_address;
    at := clock_timestamp();
    IF NOT FOUND OR r.state = 'free' OR at >= r.expires_at THEN
        a.found := 0;
        RETURN a;
    END IF;
    RETURN ibid._view(r, at);
END $$;

-- An operator's change. How: 0 complete, 1 release, 2 park, 4 forget, 5 replace the record.
CREATE FUNCTION ibid._change(
    at_address bytea, seen bigint, how smallint, failed boolean, record bytea, status integer,
    requested_ms bigint, completed_ms bigint, took_us bigint, keep_us bigint, retry_us bigint) RETURNS ibid._answer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    r ibid.idempotency_keys;
    a ibid._answer;
    at timestamptz;
    was_released boolean;
BEGIN
    SELECT * INTO r FROM ibid.idempotency_keys k WHERE k.address = at_address FOR UPDATE;
    at := clock_timestamp();
    IF NOT FOUND OR at >= r.expires_at THEN
        a.held := 2;
        a.found := 5;
        RETURN a;
    END IF;
    a := ibid._view(r, at);
    IF r.fence <> seen
        OR (how IN (0, 1, 2) AND a.found <> 3)
        OR (how = 4 AND a.found = 5)
        OR (how = 5 AND a.found <> 4) THEN
        RETURN a;
    END IF;
    a := NULL;
    a.held := 0;
    IF how = 5 THEN
        UPDATE ibid.idempotency_keys k SET record = $5, headers = NULL, body = NULL WHERE k.address = at_address;
        RETURN a;
    END IF;
    IF how = 4 THEN
        UPDATE ibid.meta m SET forgets = m.forgets + 1;
        PERFORM pg_notify('ibid_forget', encode(r.address, 'hex'));
    END IF;
    PERFORM ibid._wake(r);
    was_released := r.released;
    r := ibid._end(r, at, CASE how WHEN 4 THEN 1::smallint ELSE how END, failed, record, status, requested_ms,
                   completed_ms, took_us, keep_us, retry_us);
    r.waited := false;
    r.resolved := how = 0;
    r.released := how = 2 AND was_released;
    PERFORM ibid._put(r, true);
    RETURN a;
END $$;

-- For how long each of these holders still runs; NULL if it does not. With `mark`, its end will be notified.
CREATE FUNCTION ibid._watch_many(addresses bytea[], seen bigint[], mark boolean, OUT nth integer, OUT runs_us bigint)
RETURNS SETOF record
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '50ms' AS $$
DECLARE
    r record;
BEGIN
    FOR nth IN SELECT u.nth FROM unnest(addresses, seen) WITH ORDINALITY AS u(address, seen, nth)
               ORDER BY u.address, u.nth
    LOOP
        runs_us := NULL;
        SELECT k.lease_until, k.waited INTO r FROM ibid.idempotency_keys k
        WHERE k.address = addresses[nth] AND k.fence = seen[nth] AND k.state = 'processing'
            AND clock_timestamp() < k.lease_until AND clock_timestamp() < k.expires_at;
        IF FOUND THEN
            IF mark AND NOT r.waited THEN
                UPDATE ibid.idempotency_keys k SET waited = true
                WHERE k.address = addresses[nth] AND k.fence = seen[nth] AND k.state = 'processing'
                    AND clock_timestamp() < k.lease_until
                RETURNING k.lease_until, k.waited INTO r;
            END IF;
            IF FOUND THEN
                runs_us := greatest(0, ibid._us(r.lease_until - clock_timestamp()));
            END IF;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Names in `unfinished_keys` what was claimed since the last time and has not ended. Nothing older than `next_until` can
-- appear any more when all transactions of then have ended.
CREATE FUNCTION ibid._index_unfinished(at timestamptz) RETURNS void
LANGUAGE plpgsql SET enable_seqscan = off SET jit = off AS $$
DECLARE
    mark record;
    is_due boolean;
BEGIN
    -- A clock that was set back: all are looked through, once.
    SELECT CASE WHEN m.indexed_until > at THEN '-infinity' ELSE m.indexed_until END AS since, m.next_until, m.next_xid
    INTO mark FROM ibid.meta m;
    IF NOT EXISTS (SELECT FROM ibid.idempotency_keys k WHERE k.claimed_at > mark.since) THEN
        RETURN;
    END IF;
    is_due := pg_snapshot_xmin(pg_current_snapshot()) >= mark.next_xid;
    INSERT INTO ibid.unfinished_keys (address, check_at)
    SELECT k.address, k.lease_until FROM ibid.idempotency_keys k
    WHERE k.claimed_at > mark.since AND k.state IN ('processing', 'unknown')
        AND ((is_due AND k.claimed_at <= mark.next_until) OR k.lease_until <= at)
    ON CONFLICT DO NOTHING;
    IF is_due THEN
        UPDATE ibid.meta m SET indexed_until = least(mark.next_until, at), next_until = at - interval '2 seconds',
                               next_xid = pg_snapshot_xmax(pg_current_snapshot());
    END IF;
END $$;

-- What has not ended, and some that has.
CREATE FUNCTION ibid._unfinished() RETURNS SETOF bytea
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
BEGIN
    RETURN QUERY SELECT u.address FROM ibid.unfinished_keys u UNION
        SELECT k.address FROM ibid.idempotency_keys k
        WHERE k.claimed_at > (SELECT m.indexed_until FROM ibid.meta m) AND k.state IN ('processing', 'unknown');
END $$;

-- Removes what may go, at most so many rows, and says `unknown` of what has lapsed. One at a time.
CREATE FUNCTION ibid._sweep(at_most integer, OUT removed integer, OUT lapsed integer, OUT more boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off AS $$
DECLARE
    at timestamptz := clock_timestamp();
    highest bigint;
BEGIN
    removed := 0;
    lapsed := 0;
    more := false;
    IF NOT pg_try_advisory_xact_lock(1768057188, 1) THEN
        RETURN;
    END IF;
    WITH due AS (
        SELECT k.address, CASE WHEN k.spent IS NULL THEN k.expires_at ELSE ibid._delete_after(k) END AS delete_after
        FROM ibid.idempotency_keys k WHERE k.sweep_at <= at ORDER BY k.sweep_at LIMIT at_most FOR UPDATE SKIP LOCKED
    ), later AS (
        UPDATE ibid.idempotency_keys k SET sweep_at = due.delete_after FROM due
        WHERE k.address = due.address AND due.delete_after > at
    ), gone AS (
        DELETE FROM ibid.idempotency_keys k USING due WHERE k.address = due.address AND due.delete_after <= at
        RETURNING k.fence
    )
    SELECT count(*), max(g.fence) INTO removed, highest FROM gone g;
    IF highest IS NOT NULL THEN
        PERFORM ibid._remember_fence(highest);
    END IF;
    PERFORM ibid._index_unfinished(at);
    WITH due AS MATERIALIZED (
        SELECT u.address FROM ibid.unfinished_keys u WHERE u.check_at <= at ORDER BY u.check_at LIMIT at_most
        FOR UPDATE SKIP LOCKED
    ), unfinished AS MATERIALIZED (
        SELECT k.address, k.state = 'processing' AND k.lease_until <= at AS is_silent,
               CASE WHEN k.state = 'processing' AND k.lease_until > at THEN k.lease_until ELSE k.expires_at END AS check_at
        FROM due JOIN ibid.idempotency_keys k ON k.address = due.address
        WHERE k.state IN ('processing', 'unknown') AND k.expires_at > at FOR UPDATE OF k SKIP LOCKED
    ), later AS (
        UPDATE ibid.unfinished_keys u SET check_at = f.check_at FROM unfinished f WHERE u.address = f.address
    ), ended AS (
        DELETE FROM ibid.unfinished_keys u USING due WHERE u.address = due.address AND NOT EXISTS (
            SELECT FROM ibid.idempotency_keys k
            WHERE k.address = due.address AND k.state IN ('processing', 'unknown') AND k.expires_at > at)
    ), silent AS (
        UPDATE ibid.idempotency_keys k SET state = 'unknown', lapsed = true FROM unfinished f
        WHERE k.address = f.address AND f.is_silent
        RETURNING 1
    )
    SELECT count(*) INTO lapsed FROM silent;
    more := EXISTS (SELECT FROM ibid.idempotency_keys k WHERE k.sweep_at <= at)
        OR EXISTS (SELECT FROM ibid.unfinished_keys u WHERE u.check_at <= at);
END $$;

-- Exact, except for what is finished in a large table: that is the planner's estimate.
CREATE FUNCTION ibid._counts(OUT processing bigint, OUT unknown bigint, OUT finished bigint, OUT bytes bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = on AS $$
DECLARE
    at timestamptz := clock_timestamp();
    estimate double precision;
BEGIN
    SELECT count(*) FILTER (WHERE k.state = 'processing' AND k.lease_until > at),
           count(*) FILTER (WHERE k.state = 'unknown' OR k.lease_until <= at)
    INTO processing, unknown
    FROM ibid._unfinished() AS u(address) JOIN ibid.idempotency_keys k ON k.address = u.address
    WHERE k.state IN ('processing', 'unknown') AND k.expires_at > at;
    SELECT c.reltuples INTO estimate FROM pg_class c WHERE c.oid = 'ibid.idempotency_keys'::regclass;
    IF estimate > 1000000 THEN
        finished := greatest(0, estimate::bigint - processing - unknown);
    ELSE
        SELECT count(*) INTO finished FROM ibid.idempotency_keys k
        WHERE k.state IN ('done', 'failed') AND k.expires_at > at;
    END IF;
    bytes := pg_total_relation_size('ibid.idempotency_keys');
END $$;

-- For people and cron: removes what has expired, and says how many rows that were. Call it again while it returns
-- at_most.
CREATE FUNCTION ibid.cleanup_old_idempotency_keys(at_most integer DEFAULT 10000) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT s.removed FROM ibid._sweep(at_most) s);
END $$;
