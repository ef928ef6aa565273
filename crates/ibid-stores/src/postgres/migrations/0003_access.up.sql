-- Who may see and do what. Roles belong to the whole server; `migrate` makes them beforehand where it may.
ALTER TABLE ibid.idempotency_keys ENABLE ROW LEVEL SECURITY;
ALTER TABLE ibid.idempotency_keys FORCE ROW LEVEL SECURITY;

-- A user, named by the setting ibid.user_id, sees its own rows.
CREATE POLICY users_own_idempotency_keys ON ibid.idempotency_keys FOR SELECT TO PUBLIC
    USING (user_id <> '' AND user_id = current_setting('ibid.user_id', true));
-- The store does what it must. (`migrate` sets the roles of this and the next.)
CREATE POLICY service_role_insert_idempotency_keys ON ibid.idempotency_keys FOR ALL TO CURRENT_USER
    USING (true) WITH CHECK (true);
-- Administrators see all.
CREATE POLICY admins_view_all_idempotency_keys ON ibid.idempotency_keys FOR SELECT TO CURRENT_USER
    USING (true);

REVOKE ALL ON SCHEMA ibid FROM PUBLIC;
REVOKE ALL ON ALL TABLES IN SCHEMA ibid FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA ibid FROM PUBLIC;
