//! The shop's business.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use futures_util::{Stream, StreamExt, stream};
use tonic::{Request, Response, Status, Streaming, async_trait};

use crate::{
    proto::{
        CreateRequest, Note, OpenReply, OpenRequest, Order, PayRequest, Receipt, RefundRequest, StatsReply,
        StatsRequest, WatchRequest, orders_server::Orders,
    },
    script::{ScriptRunner, answer},
};

/// The service. Clones are the same shop.
#[derive(Clone, Debug, Default)]
pub struct Shop {
    stage: Arc<ScriptRunner>,
    ids: Arc<AtomicU64>,
}

impl Shop {
    /// Lets calls go on that wait at this gate.
    pub fn open_gate(&self, gate: &str) {
        self.stage.open_gate(gate);
    }

    /// How many calls with this key began, and how many came to their end.
    pub fn runs(&self, key: &str) -> (u32, u32) {
        let StatsReply { begun, finished } = self.stage.stats(key);
        (begun, finished)
    }

    fn id(&self, kind: &str) -> String {
        format!("{kind}-{}", self.ids.fetch_add(1, Relaxed) + 1)
    }
}

type MessageStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[async_trait]
impl Orders for Shop {
    type WatchStream = MessageStream<Order>;
    type ChatStream = MessageStream<Note>;

    async fn create(&self, request: Request<CreateRequest>) -> Result<Response<Order>, Status> {
        let (metadata, _, CreateRequest { item, amount, script }) = request.into_parts();
        let script = script.unwrap_or_default();
        let played = self.stage.run_script(&metadata, &script).await?;
        answer(Order { id: self.id("order"), item, amount, played: Some(played) }, &script)
    }

    async fn pay(&self, request: Request<PayRequest>) -> Result<Response<Receipt>, Status> {
        let (metadata, _, PayRequest { order, amount, script }) = request.into_parts();
        let script = script.unwrap_or_default();
        let played = self.stage.run_script(&metadata, &script).await?;
        answer(Receipt { id: self.id("payment"), order, amount, played: Some(played) }, &script)
    }

    async fn refund(&self, request: Request<RefundRequest>) -> Result<Response<Receipt>, Status> {
        let (metadata, _, RefundRequest { order, amount, script }) = request.into_parts();
        let script = script.unwrap_or_default();
        let played = self.stage.run_script(&metadata, &script).await?;
        answer(Receipt { id: self.id("refund"), order, amount: -amount, played: Some(played) }, &script)
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<MessageStream<Order>>, Status> {
        let WatchRequest { order, count, gate } = request.into_inner();
        let stage = self.stage.clone();
        let orders = stream::iter(0..count).then(move |nth| {
            let (stage, order, gate) = (stage.clone(), order.clone(), gate.clone());
            async move {
                if nth > 0 && !gate.is_empty() {
                    stage.wait_gate(&gate).await;
                }
                Ok(Order { id: order, amount: nth.into(), ..Order::default() })
            }
        });
        Ok(Response::new(Box::pin(orders)))
    }

    async fn chat(&self, request: Request<Streaming<Note>>) -> Result<Response<MessageStream<Note>>, Status> {
        let notes = request.into_inner().map(|note| note.map(|note| Note { text: format!("you said: {}", note.text) }));
        Ok(Response::new(Box::pin(notes)))
    }

    async fn stats(&self, request: Request<StatsRequest>) -> Result<Response<StatsReply>, Status> {
        Ok(Response::new(self.stage.stats(&request.get_ref().key)))
    }

    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<OpenReply>, Status> {
        self.stage.open_gate(&request.get_ref().gate);
        Ok(Response::new(OpenReply {}))
    }
}
