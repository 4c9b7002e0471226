//! Requests and answers: who calls, what is asked for, and in which form.

use std::{convert::Infallible, sync::Arc, time::Duration};

use ::http::{HeaderMap, Method, Request, Response, StatusCode, header};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full, Limited, StreamBody, combinators::UnsyncBoxBody};
use hyper::body::{Frame, Incoming};
use nstance_rt::tasks::Tasks;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::{StreamExt as _, wrappers::ReceiverStream};

use crate::{
    discovery,
    error::ApiError,
    faults::Faults,
    list::{list, selection},
    object::{self, Key},
    patch::PatchKind,
    query::Query,
    render::{Shape, TableHead},
    resources::Served,
    route::{Target, parts, target},
    store::Store,
    subresources::{bind, eviction::evict, scale, success, token},
    watch::{BUFFERED, Wanted, Watch},
    write::{DeleteOptions, Deleted, Part, WriteOptions, create, delete, patch_object, replace},
};

/// What a real API server takes at most.
const MAX_BODY: usize = 3 * 1024 * 1024;

pub(crate) type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// One server, as its connections see it.
pub(crate) struct App {
    pub(crate) store: Arc<Store>,
    pub(crate) faults: Faults,
    pub(crate) tasks: Tasks,
    pub(crate) bookmark_every: Duration,
}

/// A request without its transport.
struct Call {
    method: Method,
    path: String,
    query: Query,
    accept: String,
    content_type: String,
    caller: String,
    body: Bytes,
}

enum Answer {
    Json(StatusCode, Value),
    Text(&'static str),
    Watch(Box<Watch>),
}

/// Answers one request. It does not return while its caller is in a black hole.
pub(crate) async fn handle(app: Arc<App>, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let caller = caller(&app, request.headers());
    let answer = match &caller {
        Err(error) => Err(error.clone()),
        Ok(caller) => answer(&app, caller.clone(), request).await,
    };
    let code = match &answer {
        Ok(Answer::Json(code, _)) => *code,
        Ok(_) => StatusCode::OK,
        Err(error) => error.code,
    };
    let caller = caller.as_deref().unwrap_or("");
    tracing::debug!(caller, %method, path, code = code.as_u16(), "request answered");
    Ok(match answer {
        Ok(Answer::Json(code, value)) => respond(code, "application/json", value.to_string()),
        Ok(Answer::Text(text)) => respond(StatusCode::OK, "text/plain; charset=utf-8", text.to_owned()),
        Ok(Answer::Watch(watch)) => stream(&app, *watch),
        Err(error) => respond(error.code, "application/json", error.to_status().to_string()),
    })
}

fn respond(code: StatusCode, content_type: &'static str, text: String) -> Response<Body> {
    let body = Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync();
    let mut response = Response::new(body);
    *response.status_mut() = code;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

fn stream(app: &App, watch: Watch) -> Response<Body> {
    let (sender, receiver) = mpsc::channel(BUFFERED);
    app.tasks.spawn_droppable("watch", watch.run(sender));
    let mut response =
        Response::new(StreamBody::new(ReceiverStream::new(receiver).map(|it| it.map(Frame::data))).boxed_unsync());
    let json = header::HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// By bearer token, else by user agent.
fn caller(app: &App, headers: &HeaderMap) -> Result<String, ApiError> {
    let text = |name| headers.get(name).and_then(|it| it.to_str().ok()).unwrap_or("");
    match text(header::AUTHORIZATION).split_once(' ') {
        Some((scheme, token)) if scheme.eq_ignore_ascii_case("bearer") => {
            token::caller(token.trim(), app.store.clock.now())
        }
        _ => Ok(text(header::USER_AGENT).split(' ').next().unwrap_or("").to_owned()),
    }
}

async fn answer(app: &App, caller: String, request: Request<Incoming>) -> Result<Answer, ApiError> {
    app.faults.pass(&caller).await?;
    let (head, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY).collect().await.map_err(|error| {
        let message = format!("the request body could not be read, or is larger than {MAX_BODY} bytes: {error}");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLarge", message)
    })?;
    let text = |name| head.headers.get(name).and_then(|it| it.to_str().ok()).unwrap_or("").to_owned();
    let call = Call {
        accept: text(header::ACCEPT),
        content_type: text(header::CONTENT_TYPE),
        path: head.uri.path().to_owned(),
        query: Query::parse(head.uri.query().unwrap_or("")),
        method: head.method,
        caller,
        body: body.to_bytes(),
    };
    dispatch(app, &call)
}

fn dispatch(app: &App, call: &Call) -> Result<Answer, ApiError> {
    let parts = parts(&call.path);
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    if let Some(answer) = about_server(app, call, &parts)? {
        return Ok(answer);
    }
    match target(&app.store.registry, &parts).ok_or_else(ApiError::no_such_path)? {
        Target::Collection { served, namespace } => {
            app.faults.permit(&call.caller, &served.resource)?;
            collection(app, call, served, namespace)
        }
        Target::Object { served, key, subresource: None } => {
            app.faults.permit(&call.caller, &served.resource)?;
            one(app, call, &served, &key)
        }
        Target::Object { served, key, subresource: Some(name) } => {
            app.faults.permit(&call.caller, &served.resource)?;
            part(app, call, &served, &key, &name)
        }
    }
}

/// What is not about objects.
fn about_server(app: &App, call: &Call, parts: &[&str]) -> Result<Option<Answer>, ApiError> {
    let registry = &app.store.registry;
    let found = |value: Option<Value>| value.map(|value| Answer::Json(StatusCode::OK, value));
    let answer = match *parts {
        ["healthz" | "readyz" | "livez", ..] => Some(Answer::Text("ok")),
        [] => found(Some(
            json!({ "paths": ["/api", "/apis", "/healthz", "/livez", "/openapi/v3", "/readyz", "/version"] }),
        )),
        ["version"] => found(Some(discovery::version())),
        ["api"] => found(Some(discovery::core_versions())),
        ["api", version] => found(discovery::resource_list(registry, "", version)),
        ["apis"] => found(Some(discovery::group_list(registry))),
        ["apis", group] => found(discovery::one_group(registry, group)),
        ["apis", group, version] => found(discovery::resource_list(registry, group, version)),
        ["apis", "authorization.k8s.io", "v1", "selfsubjectaccessreviews"] if call.method == Method::POST => {
            Some(Answer::Json(StatusCode::CREATED, access_review(app, call)?))
        }
        ["openapi", "v3"] => found(Some(discovery::openapi_index(registry))),
        ["openapi", "v3", "api", version] => found(discovery::openapi(registry, "", version)),
        ["openapi", "v3", "apis", group, version] => found(discovery::openapi(registry, group, version)),
        _ => None,
    };
    match answer {
        Some(answer @ Answer::Json(StatusCode::OK, _)) if call.method != Method::GET => {
            drop(answer);
            Err(ApiError::method_not_allowed())
        }
        answer => Ok(answer),
    }
}

/// Every caller may do everything that no test forbids it.
fn access_review(app: &App, call: &Call) -> Result<Value, ApiError> {
    let mut review = body(call)?;
    let of = |field: &str| object::text(&review, &format!("/spec/resourceAttributes/{field}")).to_owned();
    let id = match of("group") {
        group if group.is_empty() => of("resource"),
        group => format!("{}.{group}", of("resource")),
    };
    let resource = app.store.registry.by_id(&id);
    let allowed = resource.is_none_or(|it| app.faults.permit(&call.caller, &it).is_ok());
    object::set_field(&mut review, "status", Some(json!({ "allowed": allowed })));
    Ok(review)
}

fn shape(call: &Call) -> Result<Shape, ApiError> {
    Shape::negotiate(&call.accept, &call.query)
}

fn collection(app: &App, call: &Call, served: Served, namespace: Option<String>) -> Result<Answer, ApiError> {
    let (store, query) = (&app.store, &call.query);
    match call.method {
        Method::GET if query.is_set("watch") => {
            let wanted = Wanted::parse(query)?;
            let selection = selection(query, &served.resource, namespace.as_deref())?;
            Ok(Answer::Watch(Box::new(Watch::new(
                store.clone(),
                app.faults.clone(),
                call.caller.clone(),
                served,
                selection,
                shape(call)?,
                app.bookmark_every,
                wanted,
            ))))
        }
        Method::GET => {
            let shape = shape(call)?;
            let selection = selection(query, &served.resource, namespace.as_deref())?;
            let page = list(store, &served.resource, &selection, query)?;
            Ok(Answer::Json(StatusCode::OK, shape.many(&page, &served, &*store.clock)))
        }
        Method::POST if namespace.is_some() == served.resource.namespaced => {
            let (object, options) = (body(call)?, write_options(query)?);
            let namespace = namespace.unwrap_or_default();
            let object = store.transact(|txn| create(txn, &served, &namespace, object, &options))?;
            shown(app, call, &served, StatusCode::CREATED, &object)
        }
        Method::DELETE => {
            let options = delete_options(call)?;
            let selection = selection(query, &served.resource, namespace.as_deref())?;
            let page = list(store, &served.resource, &selection, &Query::default())?;
            for object in &page.objects {
                let key = Key::new(object::namespace(object), object::name(object));
                match store.transact(|txn| delete(txn, &served.resource, &key, &options)) {
                    Err(error) if error.code == StatusCode::NOT_FOUND => {}
                    deleted => drop(deleted?),
                }
            }
            Ok(Answer::Json(StatusCode::OK, Shape::Full.many(&page, &served, &*store.clock)))
        }
        _ => Err(ApiError::method_not_allowed()),
    }
}

fn shown(app: &App, call: &Call, served: &Served, code: StatusCode, object: &Value) -> Result<Answer, ApiError> {
    let value = shape(call)?.one(object, served, TableHead::Shown, &*app.store.clock);
    Ok(Answer::Json(code, value))
}

fn one(app: &App, call: &Call, served: &Served, key: &Key) -> Result<Answer, ApiError> {
    let (store, resource) = (&app.store, &*served.resource);
    match call.method {
        Method::GET | Method::PUT | Method::PATCH => main_or_part(app, call, served, key, Part::Main),
        Method::DELETE => {
            let options = delete_options(call)?;
            let deleted = store.transact(|txn| delete(txn, resource, key, &options))?;
            match deleted {
                Deleted::Gone(object) if resource.id != "pods" => {
                    let mut status = success(StatusCode::OK);
                    status["details"] =
                        json!({ "name": key.name, "kind": resource.plural, "uid": object::uid(&object) });
                    if !resource.group.is_empty() {
                        status["details"]["group"] = json!(resource.group);
                    }
                    Ok(Answer::Json(StatusCode::OK, status))
                }
                deleted => shown(app, call, served, StatusCode::OK, &deleted.into_object()),
            }
        }
        _ => Err(ApiError::method_not_allowed()),
    }
}

/// Reads or writes the object, or one part of it.
fn main_or_part(app: &App, call: &Call, served: &Served, key: &Key, part: Part) -> Result<Answer, ApiError> {
    let (store, resource) = (&app.store, &*served.resource);
    match call.method {
        Method::GET => {
            let object = store.transact(|txn| txn.get(resource, key));
            let object = object.ok_or_else(|| ApiError::not_found(resource, &key.name))?;
            shown(app, call, served, StatusCode::OK, &object)
        }
        Method::PUT => {
            let (object, options) = (body(call)?, write_options(&call.query)?);
            let object = store.transact(|txn| replace(txn, served, key, part, object, &options))?;
            shown(app, call, served, StatusCode::OK, &object)
        }
        Method::PATCH => {
            let kind = PatchKind::of(&call.content_type, resource)?;
            let (patch, options) = (json_of(&call.body)?, write_options(&call.query)?);
            let (object, code) = store.transact(|txn| patch_object(txn, served, key, part, kind, patch, &options))?;
            shown(app, call, served, code, &object)
        }
        _ => Err(ApiError::method_not_allowed()),
    }
}

fn part(app: &App, call: &Call, served: &Served, key: &Key, name: &str) -> Result<Answer, ApiError> {
    let (store, resource) = (&app.store, &*served.resource);
    let ok = |value| Ok(Answer::Json(StatusCode::OK, value));
    let created = |value| Ok(Answer::Json(StatusCode::CREATED, value));
    match (name, &call.method) {
        ("status", _) if resource.has_status => main_or_part(app, call, served, key, Part::Status),
        ("finalize", &Method::PUT) if resource.id == "namespaces" => {
            main_or_part(app, call, served, key, Part::Finalize)
        }
        ("scale", _) if resource.scale.is_some() => {
            let options = write_options(&call.query)?;
            let wanted = match call.method {
                Method::GET => return ok(store.transact(|txn| scale::get(txn, served, key))?),
                Method::PUT => scale::Wanted::Replacement(body(call)?),
                Method::PATCH => {
                    scale::Wanted::Patch(PatchKind::of(&call.content_type, resource)?, json_of(&call.body)?)
                }
                _ => return Err(ApiError::method_not_allowed()),
            };
            ok(store.transact(|txn| scale::change(txn, served, key, wanted, &options))?)
        }
        ("eviction", &Method::POST) if resource.id == "pods" => {
            let eviction = body(call)?;
            let given = eviction.get("deleteOptions").cloned().unwrap_or(Value::Null);
            let options = delete_options_of(&given, &call.query)?;
            created(store.transact(|txn| evict(txn, served, key, &options))?)
        }
        ("binding", &Method::POST) if resource.id == "pods" => {
            let (binding, options) = (body(call)?, write_options(&call.query)?);
            created(store.transact(|txn| bind(txn, served, key, &binding, &options))?)
        }
        ("token", &Method::POST) if resource.id == "serviceaccounts" => {
            let request = body(call)?;
            created(store.transact(|txn| token::create(txn, served, key, &request))?)
        }
        _ => Err(ApiError::no_such_path()),
    }
}

/// The body of a request that is not a patch: JSON.
fn body(call: &Call) -> Result<Value, ApiError> {
    match call.content_type.split(';').next().unwrap_or("").trim() {
        "" | "application/json" | "*/*" => json_of(&call.body),
        "application/vnd.kubernetes.protobuf" => Err(ApiError::unsupported_media_type(
            "this development server takes no protobuf; use --dry-run=client -o yaml | kubectl apply -f -",
        )),
        other => Err(ApiError::unsupported_media_type(format!("this development server takes JSON, not {other}"))),
    }
}

fn json_of(bytes: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(bytes)
        .map_err(|error| ApiError::bad_request(format!("the body of the request is not JSON: {error}")))
}

fn dry_run(values: &str) -> Result<bool, ApiError> {
    match values {
        "" => Ok(false),
        "All" => Ok(true),
        other => Err(ApiError::bad_request(format!("dryRun: Unsupported value: {other:?}: supported values: \"All\""))),
    }
}

fn write_options(query: &Query) -> Result<WriteOptions, ApiError> {
    Ok(WriteOptions {
        dry_run: dry_run(query.get("dryRun"))?,
        manager: query.get("fieldManager").to_owned(),
        force: query.is_set("force"),
    })
}

fn delete_options(call: &Call) -> Result<DeleteOptions, ApiError> {
    let given = if call.body.is_empty() { Value::Null } else { body(call)? };
    delete_options_of(&given, &call.query)
}

/// From a body; what it does not say, the query may.
fn delete_options_of(given: &Value, query: &Query) -> Result<DeleteOptions, ApiError> {
    let text = |pointer: &str| given.pointer(pointer).and_then(Value::as_str).map(str::to_owned);
    let or_query = |value: Option<String>, name: &str| {
        value.or_else(|| Some(query.get(name).to_owned())).filter(|it| !it.is_empty())
    };
    let grace = given["gracePeriodSeconds"].as_i64().or_else(|| query.get("gracePeriodSeconds").parse().ok());
    Ok(DeleteOptions {
        dry_run: dry_run(&or_query(text("/dryRun/0"), "dryRun").unwrap_or_default())?,
        grace_seconds: grace,
        uid: text("/preconditions/uid"),
        version: text("/preconditions/resourceVersion"),
        propagation: or_query(text("/propagationPolicy"), "propagationPolicy"),
    })
}
