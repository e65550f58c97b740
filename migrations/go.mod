module berth/migrations

go 1.26.0
