//! Port 8993: looking at groups and instances, changing them, and watching events.

use std::sync::Arc;

use nstance_core::{ids::InstanceId, instance::Phase};
use nstance_proto::v1::{self, operator_service_server::OperatorService};
use tonic::{Request, Response, Status};

use super::{auth::Caller, conn::ConnInfo, convert, status::Refusal, watch};
use crate::{
    authority::keep,
    service::{certificates, explain, groups, instances, on_demand, refresh, status},
    term::Term,
    watch::{ErrorKind, EventKind, GroupKind, InstanceKind, Subscription},
};

pub struct Operator {
    pub term: Arc<Term>,
}

const PAGE: i32 = 200;
const MAX_PAGE: i32 = 500;

#[tonic::async_trait]
impl OperatorService for Operator {
    type WatchGroupsStream = Subscription<GroupKind>;
    type WatchInstancesStream = Subscription<InstanceKind>;
    type WatchErrorsStream = Subscription<ErrorKind>;
    type WatchEventsStream = Subscription<EventKind>;

    async fn get_config_status(&self, request: Request<()>) -> Result<Response<v1::ConfigStatusResponse>, Status> {
        Caller::of(&request)?;
        let (term, applied) = (&self.term, self.term.applied());
        let server = &applied.config.server;
        Ok(Response::new(v1::ConfigStatusResponse {
            etag: applied.etag.to_string(),
            last_modified: applied.modified.map(status::timestamp),
            size: i64::try_from(applied.size).unwrap_or(i64::MAX),
            loaded_at: Some(status::timestamp(applied.loaded_at)),
            groups_etag: term.groups.etag(),
            cluster_id: term.shared.cluster.to_string(),
            shard: term.shared.shard.to_string(),
            leader_id: term.shared.id.to_string(),
            epoch: term.epoch().0,
            provider: term.shared.provider.kind().to_owned(),
            region: server.provider.region.clone(),
            zone: server.provider.zone.clone(),
            server_version: env!("CARGO_PKG_VERSION").to_owned(),
            stale: applied.stale,
            pending_etag: term.shared.config.stored().pending.map(|etag| etag.to_string()).unwrap_or_default(),
            apply_errors: refresh::apply_errors(term),
        }))
    }

    async fn list_groups(&self, request: Request<()>) -> Result<Response<v1::ListGroupsResponse>, Status> {
        let caller = Caller::of(&request)?;
        let (groups, resume_token) = watch::list_groups(&self.term, caller.tenant());
        Ok(Response::new(v1::ListGroupsResponse { groups, resume_token }))
    }

    async fn list_instances(
        &self,
        request: Request<v1::ListInstancesRequest>,
    ) -> Result<Response<v1::ListInstancesResponse>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        // Before the look: what changes meanwhile is told again rather than never. Later pages repeat the first one's
        // token, for what they show of the others may be old by then.
        let (after, resume_token) = match page_token(&self.term, &request.page_token)? {
            Some(page) => (Some(page.after), page.resume_token),
            None => (None, self.term.watches.instances.token(caller.tenant())),
        };
        let size = if request.page_size <= 0 { PAGE } else { request.page_size.min(MAX_PAGE) };
        let size = usize::try_from(size).unwrap_or(1);
        let mut instances = status::instances(
            &self.term,
            caller.tenant(),
            |_, entry| {
                let it = entry.instance();
                let on_demand = it.ownership == nstance_core::instance::Ownership::OnDemand;
                (request.group.is_empty() || it.group.group.as_str() == request.group)
                    && (request.include_deleted || it.phase() != Phase::Deleted)
                    && request.on_demand.is_none_or(|wanted| wanted == on_demand)
            },
            after,
            size + 1,
        );
        let more = size < instances.len();
        instances.truncate(size);
        let last = instances.last().map(|it| it.instance_id.clone()).unwrap_or_default();
        let next_page_token = if more { format!("{resume_token}.{last}") } else { String::new() };
        Ok(Response::new(v1::ListInstancesResponse { instances, next_page_token, resume_token }))
    }

    async fn get_instance_status(
        &self,
        request: Request<v1::GetInstanceStatusRequest>,
    ) -> Result<Response<v1::InstanceStatusResponse>, Status> {
        let caller = Caller::of(&request)?;
        let v1::GetInstanceStatusRequest { instance_id: text, max_age } = request.into_inner();
        let max_age = max_age.map(|it| convert::duration("max_age", &it)).transpose();
        let max_age = max_age.map_err(|problem| Refusal::bad_request(vec![problem]))?;
        let missing = || Status::from(Refusal::not_found(format!("there is no instance {text}")));
        let id: InstanceId = text.parse().map_err(|_| missing())?;
        if let Some(max_age) = max_age {
            status::refresh(&self.term, caller.tenant(), id, max_age).await;
        }
        status::instance(&self.term, caller.tenant(), id).map(Response::new).ok_or_else(missing)
    }

    async fn watch_events(
        &self,
        request: Request<v1::WatchEventsRequest>,
    ) -> Result<Response<Self::WatchEventsStream>, Status> {
        let caller = Caller::of(&request)?;
        let stream = watch::events(&self.term, &caller, request.into_inner())?;
        let n_replayed = stream.n_replayed().into();
        let mut response = Response::new(stream);
        // Whoever wants to know what was, and not what comes, knows by this when to stop reading.
        response.metadata_mut().insert(watch::N_REPLAYED, n_replayed);
        Ok(response)
    }

    async fn refresh_config(
        &self,
        request: Request<v1::RefreshConfigRequest>,
    ) -> Result<Response<v1::RefreshConfigResponse>, Status> {
        let caller = Caller::of(&request)?;
        let (tenant, actor) = (caller.tenant().clone(), caller.subject());
        let v1::RefreshConfigRequest { confirm_removals, dry_run } = request.into_inner();
        // Whoever was revoked is cut off now and not in five minutes, whatever becomes of the config.
        self.term.operators.forget();
        keep::look_now(&self.term).await;
        let asked = refresh::Refresh { tenant, actor, confirm_removals, dry_run };
        let done = refresh::refresh(&self.term, asked).await?;
        Ok(Response::new(v1::RefreshConfigResponse {
            updated: done.updated,
            prev_etag: done.prev_etag,
            etag: done.etag,
            changed_groups: done.changed_groups,
            removed_groups: done.removed_groups,
            restarted: done.restarted,
            warnings: done.warnings,
        }))
    }

    async fn upsert_group(
        &self,
        request: Request<v1::UpsertGroupRequest>,
    ) -> Result<Response<v1::GroupStatus>, Status> {
        let caller = Caller::of(&request)?;
        let upsert = convert::upsert(caller.tenant(), caller.subject(), request.into_inner())?;
        let group = upsert.group.clone();
        groups::upsert(&self.term, upsert).await?;
        status::group(&self.term, &group)
            .map(Response::new)
            .ok_or_else(|| Refusal::not_found(format!("group {} was removed meanwhile", group.group)).into())
    }

    async fn delete_group(&self, request: Request<v1::DeleteGroupRequest>) -> Result<Response<()>, Status> {
        let caller = Caller::of(&request)?;
        let removal = convert::removal(caller.tenant(), caller.subject(), request.into_inner())?;
        groups::delete(&self.term, removal).await?;
        Ok(Response::new(()))
    }

    async fn create_instance(
        &self,
        request: Request<v1::CreateInstanceRequest>,
    ) -> Result<Response<v1::CreateInstanceResponse>, Status> {
        let caller = Caller::of(&request)?;
        let wish = convert::wish(caller.tenant(), caller.subject(), request.into_inner());
        let created = on_demand::create(&self.term, wish).await?;
        let (instance_id, status) = (created.instance.to_string(), created.status.to_owned());
        Ok(Response::new(v1::CreateInstanceResponse { instance_id, status }))
    }

    async fn delete_instance(
        &self,
        request: Request<v1::DeleteInstanceRequest>,
    ) -> Result<Response<v1::DeleteInstanceResponse>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let target = target(&caller, &request.instance_id)?;
        let timeout = request.drain_timeout.map(|it| convert::duration("drain_timeout", &it)).transpose();
        let timeout = timeout.map_err(|problem| Refusal::bad_request(vec![problem]))?;
        let status = instances::delete(&self.term, target, request.shrink_group, timeout).await?;
        Ok(Response::new(v1::DeleteInstanceResponse { status: status.to_owned() }))
    }

    async fn replace_instance(
        &self,
        request: Request<v1::ReplaceInstanceRequest>,
    ) -> Result<Response<v1::ReplaceInstanceResponse>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let target = target(&caller, &request.instance_id)?;
        let replacing = instances::replace(&self.term, target, request.reason).await?;
        Ok(Response::new(v1::ReplaceInstanceResponse {
            status: replacing.status.to_owned(),
            replacement_id: replacing.replacement.map(|id| id.to_string()).unwrap_or_default(),
        }))
    }

    async fn acknowledge_drained(&self, request: Request<v1::DrainAckRequest>) -> Result<Response<()>, Status> {
        let caller = Caller::of(&request)?;
        let request = request.into_inner();
        let target = target(&caller, &request.instance_id)?;
        instances::acknowledge(&self.term, target, request.drain_id).await?;
        Ok(Response::new(()))
    }

    async fn renew_certificate(
        &self,
        request: Request<v1::RenewCertificateRequest>,
    ) -> Result<Response<v1::RenewCertificateResponse>, Status> {
        let caller = Caller::of(&request)?;
        let renewed =
            certificates::renew(&self.term, &caller, ConnInfo::remote_of(&request), &request.get_ref().public_key_pem);
        Ok(Response::new(renewed.await?))
    }

    async fn plan(&self, request: Request<v1::PlanRequest>) -> Result<Response<v1::PlanResponse>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(explain::dry_run(&self.term, caller.tenant(), request.get_ref())?))
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::ExplainResponse>, Status> {
        let caller = Caller::of(&request)?;
        let subject = convert::subject(caller.tenant(), request.into_inner())?;
        Ok(Response::new(explain::explain(&self.term, &subject)?))
    }

    async fn watch_groups(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchGroupsStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(watch::groups(&self.term, &caller, &request.get_ref().resume_token)?))
    }

    async fn watch_instances(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchInstancesStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(watch::instances(&self.term, &caller, &request.get_ref().resume_token)?))
    }

    async fn watch_errors(
        &self,
        request: Request<v1::WatchRequest>,
    ) -> Result<Response<Self::WatchErrorsStream>, Status> {
        let caller = Caller::of(&request)?;
        Ok(Response::new(watch::errors(&self.term, &caller, &request.get_ref().resume_token)?))
    }
}

/// The instance a request names. What is no id names nobody.
fn target(caller: &Caller, text: &str) -> Result<instances::Target, Status> {
    let missing = |_| Refusal::not_found(format!("there is no instance {text}"));
    let instance = text.parse::<InstanceId>().map_err(missing)?;
    Ok(instances::Target { instance, tenant: caller.tenant().clone(), actor: caller.subject() })
}

/// Where a list goes on: after which instance, and what its first page said about resuming.
struct Page {
    after: InstanceId,
    resume_token: String,
}

/// `{resume token}.{last id}`: good within its epoch only.
fn page_token(term: &Term, token: &str) -> Result<Option<Page>, Status> {
    if token.is_empty() {
        return Ok(None);
    }
    token
        .split_once('.')
        .filter(|(resume_token, _)| term.watches.instances.is_of_this_epoch(resume_token))
        .and_then(|(resume_token, id)| Some(Page { after: id.parse().ok()?, resume_token: resume_token.to_owned() }))
        .map(Some)
        .ok_or_else(|| {
            let message = "page token is not of this leader; list again from the start";
            Refusal::invalid("PAGE_TOKEN", message).into()
        })
}
