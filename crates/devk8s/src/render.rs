//! The form of an answer, as the Accept header asks for it: the object, its metadata only, or a table.

use http::StatusCode;
use nstance_core::ports::clock::Clock;
use serde_json::{Value, json};

use crate::{
    error::ApiError,
    list::Page,
    object::{set_field, text, version_text},
    query::Query,
    resources::Served,
    table,
};

/// What each row of a table carries beside its cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RowObject {
    Nothing,
    Metadata,
    Full,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    Full,
    Metadata,
    Table(RowObject),
}

/// Whether a table names its columns. In a watch only the first one does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableHead {
    Shown,
    Hidden,
}

impl Shape {
    /// The first acceptable form of an Accept header; we speak JSON only.
    pub(crate) fn negotiate(accept: &str, query: &Query) -> Result<Self, ApiError> {
        if accept.trim().is_empty() {
            return Ok(Self::Full);
        }
        for range in accept.split(',') {
            let mut parts = range.split(';').map(str::trim);
            if !["application/json", "application/*", "*/*"].contains(&parts.next().unwrap_or("")) {
                continue;
            }
            match parts.find_map(|part| part.strip_prefix("as=")) {
                None => return Ok(Self::Full),
                Some("Table") => {
                    let row = match query.get("includeObject") {
                        "None" => RowObject::Nothing,
                        "Object" => RowObject::Full,
                        _ => RowObject::Metadata,
                    };
                    return Ok(Self::Table(row));
                }
                Some("PartialObjectMetadata" | "PartialObjectMetadataList") => return Ok(Self::Metadata),
                Some(_) => {}
            }
        }
        let message = "only the following media types are accepted: application/json";
        Err(ApiError::new(StatusCode::NOT_ACCEPTABLE, "NotAcceptable", message))
    }

    /// One object.
    pub(crate) fn one(self, object: &Value, served: &Served, head: TableHead, clock: &dyn Clock) -> Value {
        match self {
            Self::Full => full(object, served),
            Self::Metadata => metadata(object),
            Self::Table(row) => {
                let rows = vec![table_row(object, served, row, clock)];
                table_of(served, rows, head, json!({ "resourceVersion": version_text(object) }))
            }
        }
    }

    /// A list of objects.
    pub(crate) fn many(self, page: &Page, served: &Served, clock: &dyn Clock) -> Value {
        let mut meta = json!({ "resourceVersion": page.version.to_string() });
        if let Some(next) = &page.next {
            meta["continue"] = json!(next);
        }
        if let Some(n_remaining) = page.n_remaining {
            meta["remainingItemCount"] = json!(n_remaining);
        }
        let objects = page.objects.iter();
        match self {
            Self::Full => json!({
                "kind": served.resource.list_kind, "apiVersion": served.api_version(), "metadata": meta,
                "items": objects.map(|it| full(it, served)).collect::<Vec<_>>(),
            }),
            Self::Metadata => json!({
                "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": meta,
                "items": objects.map(|it| metadata(it)).collect::<Vec<_>>(),
            }),
            Self::Table(row) => {
                let rows = objects.map(|it| table_row(it, served, row, clock)).collect();
                table_of(served, rows, TableHead::Shown, meta)
            }
        }
    }
}

/// The object in the version that was asked for; a stored one may carry another.
fn full(object: &Value, served: &Served) -> Value {
    let mut object = object.clone();
    let api_version = served.api_version();
    if text(&object, "/apiVersion") != api_version {
        set_field(&mut object, "apiVersion", Some(json!(api_version)));
    }
    object
}

fn metadata(object: &Value) -> Value {
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] })
}

fn table_row(object: &Value, served: &Served, row: RowObject, clock: &dyn Clock) -> Value {
    let cells = table::cells(object, served, clock.now());
    match row {
        RowObject::Nothing => json!({ "cells": cells }),
        RowObject::Metadata => json!({ "cells": cells, "object": metadata(object) }),
        RowObject::Full => json!({ "cells": cells, "object": full(object, served) }),
    }
}

fn table_of(served: &Served, rows: Vec<Value>, head: TableHead, meta: Value) -> Value {
    let columns = match head {
        TableHead::Shown => table::columns(served),
        TableHead::Hidden => Vec::new(),
    };
    json!({
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta, "columnDefinitions": columns, "rows": rows,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_acceptable_form_is_taken() {
        let table = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
        let discovery = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList,application/json";
        for (accept, shape) in [
            ("", Shape::Full),
            ("*/*", Shape::Full),
            ("application/vnd.kubernetes.protobuf, application/json", Shape::Full),
            (table, Shape::Table(RowObject::Metadata)),
            (discovery, Shape::Full),
            ("application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1", Shape::Metadata),
        ] {
            assert_eq!(Shape::negotiate(accept, &Query::default()).unwrap(), shape, "{accept}");
        }
        let error = Shape::negotiate("application/vnd.kubernetes.protobuf", &Query::default()).unwrap_err();
        assert_eq!(error.code, StatusCode::NOT_ACCEPTABLE);
    }
}
