package rpcerr

import (
	"context"
	"errors"
	"log/slog"
	"strconv"
	"time"

	"github.com/twitchtv/twirp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"berth/services/internal/node"
)

// The keys of Twirp meta and of ErrorInfo's metadata.
const (
	metaReason     = "reason"
	metaRetryAfter = "retry_after_ms"
	metaPlacement  = "placement_id"
	metaReasons    = "reasons" // nodes by why they were refused, like "cordoned=1,declared_sandboxes=7"
	metaResource   = "resource"
	metaLimit      = "limit"
	metaUsed       = "used"
	metaDrain      = "drain_id"
	domain         = "berth"
)

// Twirp returns err as callers of Twirp get it: the table's code and text, with the reason and what
// a refusal adds as meta. An error that already is a twirp.Error came from Twirp itself and stays.
// Nil stays nil.
func Twirp(err error) twirp.Error {
	if err == nil {
		return nil
	}
	if already, ok := errors.AsType[twirp.Error](err); ok {
		return already
	}
	r, text, _ := find(err)
	out := twirp.NewError(r.twirp, text).WithMeta(metaReason, r.reason)
	if refused, ok := errors.AsType[*node.Refused](err); ok {
		if refused.RetryAfter > 0 {
			out = out.WithMeta(metaRetryAfter, strconv.FormatInt(refused.RetryAfter.Milliseconds(), 10))
		}
		for key, value := range details(refused) {
			out = out.WithMeta(key, value)
		}
	}
	if open, ok := errors.AsType[*node.DrainOpen](err); ok {
		out = out.WithMeta(metaDrain, strconv.FormatInt(open.ID, 10))
	}
	return out
}

// GRPC returns err as callers of gRPC get it: a status with ErrorInfo and, where trying again may
// help, RetryInfo. Nil stays nil.
func GRPC(err error) error {
	if err == nil {
		return nil
	}
	r, text, _ := find(err)
	info := &errdetails.ErrorInfo{Reason: r.reason, Domain: domain}
	all := []protoadapt.MessageV1{info}
	if refused, ok := errors.AsType[*node.Refused](err); ok {
		info.Metadata = details(refused)
		if refused.RetryAfter > 0 {
			all = append(all, &errdetails.RetryInfo{RetryDelay: durationpb.New(refused.RetryAfter)})
		}
	}
	plain := status.New(r.grpc, text)
	if full, err := plain.WithDetails(all...); err == nil {
		return full.Err()
	}
	return plain.Err()
}

// Known reports whether err has a row, so that its cause need not be logged as an error.
func Known(err error) bool {
	_, _, ok := find(err)
	return ok
}

// Decode returns the domain error that a Twirp or gRPC client's error stands for, wrapped so that
// errors.Is finds it; a refusal is a *node.Refused again. An error of neither kind, or without a
// reason that this build knows, is returned as it is.
func Decode(err error) error {
	if err == nil {
		return nil
	}
	if remote, ok := errors.AsType[twirp.Error](err); ok {
		retry, _ := strconv.ParseInt(remote.Meta(metaRetryAfter), 10, 64) // absent is 0
		if drain, err := strconv.ParseInt(remote.Meta(metaDrain), 10, 64); err == nil {
			return &node.DrainOpen{ID: drain}
		}
		return decoded(err, remote.Meta(metaReason), remote.Msg(), time.Duration(retry)*time.Millisecond, parseDetails(remote.Meta))
	}
	remote, ok := status.FromError(err)
	if !ok {
		return err
	}
	var reason string
	var retry time.Duration
	var refused *node.Refused
	for _, detail := range remote.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.GetDomain() == domain {
				reason = d.GetReason()
				refused = parseDetails(func(key string) string { return d.GetMetadata()[key] })
			}
		case *errdetails.RetryInfo:
			retry = d.GetRetryDelay().AsDuration()
		}
	}
	return decoded(err, reason, remote.Message(), retry, refused)
}

func decoded(err error, reason, text string, retry time.Duration, refused *node.Refused) error {
	switch reason {
	case "":
		return err
	case "invalid":
		return &Invalid{Text: text}
	case "internal":
		return ErrInternal
	}
	for _, r := range table {
		if r.reason != reason {
			continue
		}
		if retry > 0 && refused == nil {
			refused = &node.Refused{}
		}
		if refused != nil {
			refused.Cause, refused.RetryAfter = r.cause, retry
			return refused
		}
		return r.cause
	}
	return err
}

// TwirpInterceptor gives the errors of all methods their code, and logs what has no row.
func TwirpInterceptor(log *slog.Logger) twirp.Interceptor {
	return func(next twirp.Method) twirp.Method {
		return func(ctx context.Context, request any) (any, error) {
			response, err := next(ctx, request)
			if err == nil {
				return response, nil
			}
			method, _ := twirp.MethodName(ctx)
			report(ctx, log, method, err)
			return nil, Twirp(err)
		}
	}
}

// GRPCInterceptor gives the errors of all unary methods their code, and logs what has no row.
func GRPCInterceptor(log *slog.Logger) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, request any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
		response, err := next(ctx, request)
		if err == nil {
			return response, nil
		}
		if _, ok := status.FromError(err); ok && status.Code(err) != codes.Unknown {
			return nil, err // gRPC's own, or the health service's
		}
		report(ctx, log, info.FullMethod, err)
		return nil, GRPC(err)
	}
}

func report(ctx context.Context, log *slog.Logger, method string, err error) {
	level := slog.LevelDebug
	switch r, _, known := find(err); {
	case !known:
		level = slog.LevelError
	case r.cause == ErrUnavailable: //nolint:errorlint // the row itself is asked for
		level = slog.LevelWarn
	}
	log.Log(ctx, level, "call refused", slog.String("method", method), slog.Any("error", err))
}
