//! Administrative calls.

use ibid::store::{EntryCounts, EntryFilter, EntryPage, ListCursor};

use super::{
    rows::{ENTRY_INFO_COLUMNS, micros_param, postgres_text},
    *,
};

/// Deadline of listings and counts, which may have to read many rows.
const LIST_TIMEOUT: Duration = Duration::from_secs(10);
const FORGET_CODE: i16 = 4;
const REPLACE_CODE: i16 = 5;

impl Postgres {
    async fn change_entry(
        &self, at: &Address, seen: Fence, end: SettlementParams<'_>,
    ) -> Result<SettleOutcome, StoreError> {
        let (address, seen) = (&at.0[..], rows::fence_param(seen));
        let mut params: Vec<&(dyn ToSql + Sync)> = vec![&address, &seen];
        params.extend(end.params());
        let found = self.pool.call(Statement::Change, &params, self.pool.deadline()).await?;
        rows::read_outcome(first_row(&found)?, None)?.into_settle_outcome()
    }

    async fn list_page(&self, filter: &EntryFilter, from: ListCursor, at_most: u32) -> Result<EntryPage, StoreError> {
        let tags = [&filter.tenant, &filter.user, &filter.endpoint, &filter.key, &filter.key_hash];
        let tags = tags.map(|tag| tag.as_deref().map(postgres_text));
        let address = filter.address.as_ref().map(|at| &at.0[..]);
        let (from, age) = (from.0.as_ref().map(|at| at.0), filter.older_than.map(micros_param));
        let (from, limit) = (from.as_ref().map(|at| &at[..]), i64::from(at_most) + 1);
        let mut sql = format!(
            "SELECT {ENTRY_INFO_COLUMNS} FROM ibid.idempotency_keys k WHERE k.state <> 'free' AND k.expires_at > statement_timestamp()"
        );
        let mut params: Vec<(&(dyn ToSql + Sync), Type)> = Vec::new();
        sql += match filter.state {
            None => "",
            Some(EntryState::Processing) => {
                " AND k.state = 'processing' AND k.lease_until > statement_timestamp() \
                 AND k.address IN (SELECT ibid._unfinished())"
            }
            Some(EntryState::Unknown) => {
                " AND k.state IN ('processing', 'unknown') AND (k.state = 'unknown' OR k.lease_until <= statement_timestamp()) \
                 AND k.address IN (SELECT ibid._unfinished())"
            }
            Some(EntryState::Done) => " AND k.state = 'done'",
            Some(EntryState::Failed) => " AND k.state = 'failed'",
        };
        for (column, tag) in ["tenant", "user_id", "endpoint", "key", "key_hash"].into_iter().zip(&tags) {
            if let Some(tag) = tag {
                params.push((tag, Type::TEXT));
                sql += &format!(" AND k.{column} = ${}", params.len());
                // Lets the planner use the partial index, which excludes empty tags.
                if !tag.is_empty() {
                    sql += &format!(" AND k.{column} <> ''");
                }
            }
        }
        if let Some(address) = &address {
            params.push((address, Type::BYTEA));
            sql += &format!(" AND k.address = ${}", params.len());
        }
        if let Some(from) = &from {
            params.push((from, Type::BYTEA));
            sql += &format!(" AND k.address > ${}", params.len());
        }
        if let Some(age) = &age {
            params.push((age, Type::INT8));
            sql += &format!(" AND k.claimed_at < ibid._after(statement_timestamp(), -${})", params.len());
        }
        params.push((&limit, Type::INT8));
        sql += &format!(" ORDER BY k.address LIMIT ${}", params.len());
        let found = self.pool.read(&sql, &params, LIST_TIMEOUT).await?;
        let entries = found.iter().map(rows::read_entry_info).collect::<Result<Vec<_>, _>>()?;
        let mut page = EntryPage::truncated(entries, at_most as usize);
        // Tags with zero bytes are stored with a replacement character: compare their exact form.
        page.entries.retain(|entry| filter.matches(entry));
        Ok(page)
    }
}

impl StoreAdmin for Postgres {
    fn list<'a>(&'a self, filter: &'a EntryFilter, from: ListCursor, at_most: u32) -> StoreFuture<'a, EntryPage> {
        StoreFuture::boxed(self.list_page(filter, from, at_most))
    }

    fn resolve<'a>(&'a self, at: &'a Address, seen: Fence, end: &'a Settlement) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(self.change_entry(at, seen, SettlementParams::new(end)))
    }

    fn forget<'a>(&'a self, at: &'a Address, seen: Fence) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            self.waiters.notifications.forget(at);
            let end = SettlementParams { kind: FORGET_CODE, ..SettlementParams::default() };
            let forgotten = self.change_entry(at, seen, end).await;
            // Again: a concurrent read may have cached it meanwhile.
            self.waiters.notifications.forget(at);
            forgotten
        })
    }

    fn replace_record<'a>(&'a self, at: &'a Address, seen: Fence, record: Bytes) -> StoreFuture<'a, SettleOutcome> {
        StoreFuture::boxed(async move {
            let end = SettlementParams { kind: REPLACE_CODE, record: Some(&record), ..SettlementParams::default() };
            self.change_entry(at, seen, end).await
        })
    }

    fn counts(&self) -> StoreFuture<'_, EntryCounts> {
        StoreFuture::boxed(async move {
            let sql = "SELECT c.processing, c.unknown, c.finished, c.bytes FROM ibid._counts() c";
            let found = self.pool.read(sql, &[], LIST_TIMEOUT).await?;
            let row = first_row(&found)?;
            let number = |at| rows::count_at(row, at);
            Ok(EntryCounts { processing: number(0)?, unknown: number(1)?, finished: number(2)?, bytes: number(3)? })
        })
    }

    fn clock(&self) -> StoreFuture<'_, Option<Duration>> {
        StoreFuture::boxed(async move {
            let sql = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::int8";
            let found = self.pool.read(sql, &[], LIST_TIMEOUT).await?;
            Ok(Some(Duration::from_millis(rows::count_at(first_row(&found)?, 0)?)))
        })
    }
}
