-- The inbox: which events of a broker were handled, by whom. What has no underscore is for every language.
--
-- Rules that hold throughout: an event is marked in the transaction that has its effect, so that both are there or
-- neither; many events are marked in the order of their names, so that no two calls wait for each other; what is so old
-- that its mark may be gone is never taken for new.

CREATE TABLE ibid.processed_events (
    consumer     text        COLLATE "C" NOT NULL,
    source       text        COLLATE "C" NOT NULL,
    event_id     text        COLLATE "C" NOT NULL,
    -- As its source says.
    event_at     timestamptz,
    processed_at timestamptz NOT NULL,
    forget_after timestamptz NOT NULL,
    PRIMARY KEY (consumer, source, event_id)
);
CREATE INDEX processed_events_forget_after ON ibid.processed_events (forget_after);

-- Events whose handlers failed. Written by transactions of their own: the handler's was rolled back.
CREATE TABLE ibid.failed_events (
    consumer        text        COLLATE "C" NOT NULL,
    source          text        COLLATE "C" NOT NULL,
    event_id        text        COLLATE "C" NOT NULL,
    attempts        integer     NOT NULL,
    first_failed_at timestamptz NOT NULL,
    last_failed_at  timestamptz NOT NULL,
    last_error      text        NOT NULL,
    -- Somebody forgot it, so that it is handled again: it is not too old, whatever its age.
    redriven        boolean     NOT NULL DEFAULT false,
    forget_after    timestamptz NOT NULL,
    PRIMARY KEY (consumer, source, event_id)
);
CREATE INDEX failed_events_forget_after ON ibid.failed_events (forget_after);

-- What happened up to then may have been handled, and its mark removed since.
CREATE TABLE ibid.event_horizons (
    consumer text        COLLATE "C" PRIMARY KEY,
    until    timestamptz NOT NULL
);

-- found: 0 new, 1 duplicate, 2 too old, 3 poisoned.
CREATE TYPE ibid._claimed_event AS (
    nth      integer,
    found    smallint,
    attempts integer,
    error    text,
    event_at timestamptz,
    redriven boolean
);

-- Marks events, in the caller's transaction. An event that another transaction has marked and not committed yet is
-- waited for: it is a duplicate if that one commits, and new if it does not. `ats` are microseconds since the epoch; the
-- smallest number says that nobody knows.
CREATE FUNCTION ibid._claim_events(consumers text[], sources text[], ids text[], ats bigint[], keep_us bigint,
    poison_after integer) RETURNS SETOF ibid._claimed_event
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := clock_timestamp();
    answers ibid._claimed_event[];
    late integer[];
BEGIN
    WITH asked AS MATERIALIZED (
        SELECT u.nth::integer AS nth, u.consumer COLLATE "C" AS consumer, u.source COLLATE "C" AS source, u.id COLLATE "C" AS id,
               CASE WHEN u.at_us > -9223372036854775808 THEN ibid._after('epoch', u.at_us) END AS event_at,
               row_number() OVER (PARTITION BY u.consumer COLLATE "C", u.source COLLATE "C", u.id COLLATE "C"
                                  ORDER BY u.nth) = 1 AS first
        FROM unnest(consumers, sources, ids, ats) WITH ORDINALITY AS u(consumer, source, id, at_us, nth)
    ), judged AS MATERIALIZED (
        SELECT a.*, f.attempts, f.last_error, coalesce(f.redriven, false) AS redriven,
               CASE WHEN f.attempts >= poison_after THEN 3
                    WHEN a.event_at <= greatest(ibid._after(at, -keep_us), h.until) AND f.redriven IS NOT TRUE THEN 2
                    ELSE 0 END AS verdict
        FROM asked a
        LEFT JOIN ibid.failed_events f
            ON f.consumer = a.consumer AND f.source = a.source AND f.event_id = a.id AND f.forget_after > at
        LEFT JOIN ibid.event_horizons h ON h.consumer = a.consumer
        WHERE a.first
    ), marked AS (
        INSERT INTO ibid.processed_events AS p (consumer, source, event_id, event_at, processed_at, forget_after)
        SELECT j.consumer, j.source, j.id, j.event_at, at, ibid._after(at, keep_us)
        FROM judged j WHERE j.verdict = 0 ORDER BY j.consumer, j.source, j.id
        ON CONFLICT DO NOTHING
        RETURNING p.consumer, p.source, p.event_id
    )
    SELECT array_agg(ROW(a.nth,
               CASE WHEN a.first AND m.event_id IS NOT NULL THEN 0
                    -- Of several copies in one call the first is judged, and the others are its duplicates.
                    WHEN j.verdict <> 0 AND NOT EXISTS (SELECT FROM ibid.processed_events p WHERE p.consumer = a.consumer
                                                        AND p.source = a.source AND p.event_id = a.id) THEN j.verdict
                    ELSE 1 END,
               j.attempts, j.last_error, a.event_at, j.redriven)::ibid._claimed_event ORDER BY a.nth)
    INTO answers
    FROM asked a
    JOIN judged j ON j.consumer = a.consumer AND j.source = a.source AND j.id = a.id
    LEFT JOIN marked m ON m.consumer = a.consumer AND m.source = a.source AND m.event_id = a.id;
    -- A sweep may have removed a mark after this call began to look, and made room for it: then it has said how far it
    -- got, and this is the first that sees it.
    SELECT array_agg(a.nth) INTO late FROM unnest(answers) a JOIN ibid.event_horizons h ON h.consumer = consumers[a.nth]
    WHERE a.found = 0 AND NOT a.redriven AND a.event_at <= h.until;
    IF late IS NOT NULL THEN
        DELETE FROM ibid.processed_events p USING unnest(late) AS l(nth)
        WHERE p.consumer = consumers[l.nth] AND p.source = sources[l.nth] AND p.event_id = ids[l.nth];
    END IF;
    RETURN QUERY SELECT a.nth, CASE WHEN a.nth = ANY(late) THEN 2::smallint ELSE a.found END, a.attempts, a.error,
        a.event_at, a.redriven FROM unnest(answers) a ORDER BY a.nth;
END $$;

-- Marks one event of which nothing is known, which is by far the most frequent case, in a transaction that this begins.
-- Otherwise it is false, or raises IB005 for drivers that cannot read the result of a statement that travels with BEGIN.
CREATE FUNCTION ibid._begin_event(of_consumer text, of_source text, id text, at_us bigint, keep_us bigint, raises boolean)
RETURNS boolean
LANGUAGE plpgsql AS $$
DECLARE
    now timestamptz := clock_timestamp();
    happened timestamptz := CASE WHEN at_us > -9223372036854775808 THEN ibid._after('epoch', at_us) END;
BEGIN
    PERFORM FROM ibid.failed_events f
    WHERE f.consumer = of_consumer COLLATE "C" AND f.source = of_source COLLATE "C" AND f.event_id = id COLLATE "C";
    IF NOT FOUND AND (happened > ibid._after(now, -keep_us)) IS NOT FALSE THEN
        INSERT INTO ibid.processed_events (consumer, source, event_id, event_at, processed_at, forget_after)
        VALUES (of_consumer, of_source, id, happened, now, ibid._after(now, keep_us))
        ON CONFLICT DO NOTHING;
        IF FOUND THEN
            -- Only now: a sweep may have removed the mark that made room for this one.
            PERFORM FROM ibid.event_horizons h WHERE h.consumer = of_consumer COLLATE "C" AND h.until >= happened;
            IF NOT FOUND THEN
                RETURN true;
            END IF;
        END IF;
    END IF;
    IF raises THEN
        RAISE EXCEPTION 'the event was handled before, has failed, or is too old' USING ERRCODE = 'IB005';
    END IF;
    RETURN false;
END $$;

-- Takes back the mark of an event that failed, in the transaction that made it: the others of its batch keep theirs.
CREATE FUNCTION ibid._unclaim_event(of_consumer text, of_source text, id text) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM ibid.processed_events p
    WHERE p.consumer = of_consumer COLLATE "C" AND p.source = of_source COLLATE "C" AND p.event_id = id COLLATE "C"
      -- One from before this transaction is taken back by forgetting.
      AND p.processed_at >= transaction_timestamp();
    RETURN FOUND;
END $$;

-- Counts a failure, in a transaction of its own. Returns how many there are.
CREATE FUNCTION ibid._event_failed(of_consumer text, of_source text, id text, error text, keep_us bigint) RETURNS integer
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := clock_timestamp();
    counted integer;
BEGIN
    INSERT INTO ibid.failed_events AS f
        (consumer, source, event_id, attempts, first_failed_at, last_failed_at, last_error, forget_after)
    VALUES (of_consumer, of_source, id, 1, at, at, left(error, 1024), ibid._after(at, keep_us))
    ON CONFLICT (consumer, source, event_id) DO UPDATE SET
        attempts = CASE WHEN f.forget_after > at THEN least(f.attempts, 2147483646) + 1 ELSE 1 END,
        first_failed_at = CASE WHEN f.forget_after > at AND f.attempts > 0 THEN f.first_failed_at ELSE at END,
        redriven = f.redriven AND f.forget_after > at,
        last_failed_at = at, last_error = excluded.last_error, forget_after = excluded.forget_after
    RETURNING f.attempts INTO counted;
    RETURN counted;
END $$;

-- Forgets an event, marks and failures, so that it is handled again whatever its age. Returns whether there was anything to
-- forget: it was handled, or has failed.
CREATE FUNCTION ibid._forget_event(of_consumer text, of_source text, id text, keep_us bigint) RETURNS boolean
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := clock_timestamp();
    was_there boolean;
BEGIN
    DELETE FROM ibid.processed_events p
    WHERE p.consumer = of_consumer COLLATE "C" AND p.source = of_source COLLATE "C" AND p.event_id = id COLLATE "C";
    was_there := FOUND OR EXISTS (
        SELECT FROM ibid.failed_events f WHERE f.consumer = of_consumer COLLATE "C" AND f.source = of_source COLLATE "C"
            AND f.event_id = id COLLATE "C" AND f.attempts > 0);
    INSERT INTO ibid.failed_events AS f
        (consumer, source, event_id, attempts, first_failed_at, last_failed_at, last_error, redriven, forget_after)
    VALUES (of_consumer, of_source, id, 0, at, at, 'forgotten, to be handled again', true, ibid._after(at, keep_us))
    ON CONFLICT (consumer, source, event_id) DO UPDATE SET
        attempts = 0, redriven = true, first_failed_at = at, last_failed_at = at, last_error = excluded.last_error,
        forget_after = excluded.forget_after;
    RETURN was_there;
END $$;

-- Removes at most so many marks and failures that have had their time, and notes how far it got. Of several sweepers one
-- works.
CREATE FUNCTION ibid._sweep_events(at_most integer, OUT removed integer, OUT more boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := clock_timestamp();
    failures integer;
BEGIN
    removed := 0;
    more := false;
    IF NOT pg_try_advisory_xact_lock(1768057188, 3) THEN
        RETURN;
    END IF;
    WITH old AS (
        SELECT p.consumer, p.source, p.event_id FROM ibid.processed_events p WHERE p.forget_after <= at
        ORDER BY p.forget_after LIMIT at_most FOR UPDATE SKIP LOCKED
    ), gone AS (
        DELETE FROM ibid.processed_events p USING old
        WHERE p.consumer = old.consumer AND p.source = old.source AND p.event_id = old.event_id
        -- Not later than it was handled, whatever its source says: one wrong clock must not make all others too old.
        RETURNING p.consumer, least(p.event_at, p.processed_at) AS happened
    ), raised AS (
        INSERT INTO ibid.event_horizons AS h (consumer, until)
        SELECT g.consumer, max(g.happened) FROM gone g GROUP BY g.consumer ORDER BY g.consumer
        ON CONFLICT (consumer) DO UPDATE SET until = excluded.until WHERE h.until < excluded.until
    )
    SELECT count(*)::integer INTO removed FROM gone;
    WITH old AS (
        SELECT f.consumer, f.source, f.event_id FROM ibid.failed_events f WHERE f.forget_after <= at
        ORDER BY f.forget_after LIMIT at_most - removed FOR UPDATE SKIP LOCKED
    )
    DELETE FROM ibid.failed_events f USING old
    WHERE f.consumer = old.consumer AND f.source = old.source AND f.event_id = old.event_id;
    GET DIAGNOSTICS failures = ROW_COUNT;
    removed := removed + failures;
    more := EXISTS (SELECT FROM ibid.processed_events p WHERE p.forget_after <= at)
        OR EXISTS (SELECT FROM ibid.failed_events f WHERE f.forget_after <= at);
END $$;

-- What the store calls: keys, then events, at most so many in all.
CREATE FUNCTION ibid._sweep_all(at_most integer, OUT removed integer, OUT lapsed integer, OUT more boolean)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    keys record;
    events record;
BEGIN
    SELECT * INTO keys FROM ibid._sweep(at_most);
    SELECT * INTO events FROM ibid._sweep_events(at_most - keys.removed);
    removed := keys.removed + events.removed;
    lapsed := keys.lapsed;
    more := keys.more OR events.more;
END $$;

-- For every language: 'new', 'duplicate', 'too old' or 'poisoned', in the caller's transaction.
CREATE FUNCTION ibid.claim_event(consumer text, source text, event_id text, event_at timestamptz DEFAULT NULL,
    keep interval DEFAULT '7 days', poison_after integer DEFAULT 5) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF coalesce(consumer, '') = '' OR coalesce(source, '') = '' OR coalesce(event_id, '') = '' THEN
        RAISE EXCEPTION 'an event is named by its consumer, its source and its id; none of them may be NULL or empty'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN (SELECT (ARRAY['new', 'duplicate', 'too old', 'poisoned'])[c.found + 1]
            FROM ibid._claim_events(ARRAY[consumer], ARRAY[source], ARRAY[event_id],
                ARRAY[coalesce(ibid._clock_us(event_at), -9223372036854775808)], ibid._us(keep), poison_after) c);
END $$;

-- After a rollback, in a transaction of its own. Returns how often it has failed.
CREATE FUNCTION ibid.event_failed(consumer text, source text, event_id text, error text, keep interval DEFAULT '7 days')
RETURNS integer LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$ SELECT ibid._event_failed($1, $2, $3, coalesce($4, ''), ibid._us($5)) $$;

CREATE FUNCTION ibid.forget_event(consumer text, source text, event_id text, keep interval DEFAULT '7 days')
RETURNS boolean LANGUAGE sql SET search_path = pg_catalog, pg_temp
AS $$ SELECT ibid._forget_event($1, $2, $3, ibid._us($4)) $$;

REVOKE ALL ON ALL TABLES IN SCHEMA ibid FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ibid FROM PUBLIC;
