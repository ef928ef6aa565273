import 'reflect-metadata'
import { HttpException, Module } from '@nestjs/common'
import { NestFactory } from '@nestjs/core'
import { from, lastValueFrom } from 'rxjs'
import { Ibid, nestInterceptor } from 'ibid-client/server'
import { BookingsController, prepareDatabase } from './bookings.js'

@Module({ controllers: [BookingsController] })
class AppModule {}

await prepareDatabase()
const app = await NestFactory.create(AppModule, { logger: ['error', 'warn'], rawBody: true })
const ibid = new Ibid({ address: 'unix:ibid.sock' })
app.useGlobalInterceptors(nestInterceptor(ibid, { HttpException, from, lastValueFrom }))
await app.listen(Number(process.env.PORT ?? 3000), '127.0.0.1')
